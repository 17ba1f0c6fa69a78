"""What tables say of a summary: what its rows share, who is the best of each setting, and what that means."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from fcl_bench.config import text
from fcl_bench.errors import UserError
from fcl_bench.execution.folder import RunFolder
from fcl_bench.execution.screen import indifference
from fcl_bench.results.best import LEGEND, Verdict, judged, remarks
from fcl_bench.results.measures import Measure
from fcl_bench.results.summarise import CEILINGS, NO_PART, knobs, setting, signature

#: Keys of the setting that decide who holds which samples.
_DEALS = ("beta", "clients", "partition")


def constants(summary: pd.DataFrame) -> list[str]:
    """Return what all rows share in one line, then what the rows of each method share in another."""
    methods = {method: _shared(rows, knobs(rows)) for method, rows in summary.groupby("method")}
    lines = [_shared(summary, setting(summary)), "; ".join(f"{name}: {own}" for name, own in methods.items() if own)]
    return [line for line in lines if line]


def verdicts(summary: pd.DataFrame, measure: Measure) -> dict[Hashable, Verdict]:
    """Return, per row, how it stands beside the best of its setting; ceilings do not compete, nor rows that meet a
    gate: they are no fair sample of their method.
    """
    found: dict[Hashable, Verdict] = {}
    competes = ~summary["method"].isin(CEILINGS) & (summary["gates"] == "") & summary[f"{measure.name}_mean"].notna()
    for _, rows in summary.groupby(signature(summary, setting(summary)), sort=False):
        runs = [
            dict(zip(row["seeds"], zip(row["values"][measure.name], row["folders"], strict=True), strict=True))
            if competes[index]
            else None
            for index, row in rows.iterrows()
        ]
        found |= zip(rows.index, judged(runs, measure.name, measure.higher), strict=True)
    return found


def legend(summary: pd.DataFrame, found: Mapping[str, Mapping[Hashable, Verdict]]) -> str:
    """Return what the marks mean, and what has no interval or is not compared.

    Args:
        summary: whose labels name the rows.
        found: name of a measure -> the result of `verdicts`.
    """
    named = [(summary["label"][index], verdict) for of in found.values() for index, verdict in of.items()]
    return " ".join(filter(None, [LEGEND, NO_PART, remarks(named)]))


def indifferent(summary: pd.DataFrame) -> str:
    """Return which labels no partition changes, as their methods declare; "" for none, or where none could show it."""
    names: list[str] = []
    moot: set[str] = set()
    for label, rows in summary.groupby("label", sort=False):
        varied = {key for key in _DEALS if key in rows and rows[key].map(text).nunique() > 1}
        if (varied or (rows["n"] > 1).any()) and all(map(_ignores_partition, rows["folders"])):
            names.append(str(label))
            moot |= varied
    return indifference(names, moot, bool((summary["n"] > 1).any()))


def _ignores_partition(folders: Sequence[str]) -> bool:
    """Whether the first of a row's runs says so; reference runs have no folder, and a class may be gone."""
    try:
        return bool(folders[0]) and RunFolder(Path(folders[0])).ignores_partition()
    except UserError:
        return False


def _shared(rows: pd.DataFrame, columns: list[str]) -> str:
    """Describe the columns with one value in all rows, except values that are null, absent or only a fingerprint."""
    values = {column: set(rows[column].map(text)) for column in columns if "fingerprint" not in column}
    shared = {column: min(found) for column, found in values.items() if len(found) == 1 and column != "features"}
    return ", ".join(f"{c.removeprefix('method.')} {v}" for c, v in shared.items() if v not in ("", "null"))
