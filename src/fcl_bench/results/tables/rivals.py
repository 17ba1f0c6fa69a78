"""What tables say of a summary: what its rows share, who is the best of each setting, and what that means."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path

import pandas as pd

from fcl_bench.config import text
from fcl_bench.errors import UserError
from fcl_bench.execution.folder import RunFolder, ignores_partition
from fcl_bench.execution.screen import indifference
from fcl_bench.results.best import LEGEND, Verdict, judged, remarks
from fcl_bench.results.measures import Measure
from fcl_bench.results.summarise import CEILINGS, NO_PART, knobs, setting, signature

#: Keys of the setting that decide who holds which samples.
_DEALS = ("beta", "clients", "partition")


def constants(summary: pd.DataFrame) -> list[str]:
    """Return what all rows share in one line, then what the rows of each method share in another."""
    kinds = summary[knobs(summary)].map(text).groupby(summary["method"])
    lone, first = kinds.nunique() == 1, kinds.first()
    methods = {method: _named(first.loc[method][lone.loc[method]]) for method in first.index}
    own = "; ".join(f"{method}: {values}" for method, values in methods.items() if values)
    shared = summary[setting(summary)].map(text)
    return [line for line in (_named(shared.iloc[0][shared.nunique() == 1]), own) if line]


#: Name of a measure -> the place in a summary -> how the row stands beside the best of its setting.
Verdicts = dict[str, dict[Hashable, Verdict]]


def verdicts(summary: pd.DataFrame, measures: Sequence[Measure]) -> Verdicts:
    """Return how each row stands beside the best of its setting; ceilings do not compete, nor rows that meet a gate:
    they are no fair sample of their method.
    """
    found: Verdicts = {measure.name: {} for measure in measures}
    competes = ~summary["method"].isin(CEILINGS) & (summary["gates"] == "")
    columns = [summary[name] for name in ("seeds", "values", "folders")]
    runs = {place: row if fair else None for place, fair, *row in zip(summary.index, competes, *columns, strict=True)}
    kinds = signature(summary, setting(summary))
    # All measures of one setting before the next one: their answers are read once.
    for places in kinds.groupby(kinds, sort=False).groups.values():
        for measure in measures:
            rivals = [
                dict(zip(row[0], zip(row[1][measure.name], row[2], strict=True), strict=True)) if row else None
                for row in map(runs.get, places)
            ]
            found[measure.name] |= zip(places, judged(rivals, measure.name, measure.higher), strict=True)
    return found


def legend(summary: pd.DataFrame, found: Verdicts) -> str:
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
        return bool(folders[0]) and ignores_partition(RunFolder(Path(folders[0])).config())
    except UserError:
        return False


def _named(values: pd.Series) -> str:
    """Name values by their keys, except those that are null, absent or only a fingerprint."""
    shared = [key for key, value in values.items() if value not in ("", "null") and key != "features"]
    return ", ".join(f"{key.removeprefix('method.')} {values[key]}" for key in shared if "fingerprint" not in key)
