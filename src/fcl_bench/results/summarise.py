"""Runs grouped over seeds: one row a method and setting, with means and standard deviations."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from fcl_bench.config import is_number, text
from fcl_bench.results.collect import RUN_COLUMNS
from fcl_bench.results.measures import MEASURES, by_task

log = logging.getLogger(__name__)

#: The method that sees all data at once: a ceiling, not a competitor.
CEILING = "joint"
#: With the one that trains the network.
CEILINGS = (CEILING, "joint_training")

#: Of the setting, what is shown wherever it varies; the rest is shown only where these do not tell it already.
_PRIMARY = (
    *("data", "backbone", "split", "partition", "beta", "clients", "tasks"),
    *("label_rate", "adapt", "faults", "noise", "secure", "protocol", "dtype"),
    *("wire.dtype", "wire.factors", "device"),
)


def knobs(frame: pd.DataFrame) -> list[str]:
    """The columns that hold the methods' knobs."""
    return [column for column in frame if column.startswith("method.")]


def setting(frame: pd.DataFrame) -> list[str]:
    """The columns that describe what the methods had to do: all of the configuration but the method."""
    results = {"label", "family", "n", "seeds", "run_ids", *RUN_COLUMNS, *MEASURES}
    results |= {f"{measure}_{part}" for measure in MEASURES for part in ("mean", "std")}
    rest = [column for column in frame if column not in (*results, *_PRIMARY, "method", *knobs(frame))]
    rest = [column for column in rest if not by_task(re.sub("_(mean|std)$", "", column))]
    return [column for column in _PRIMARY if column in frame] + rest


def varying_setting(frame: pd.DataFrame) -> list[str]:
    """The columns of the setting that vary, less the minor ones that follow from those before them."""
    shown: list[str] = []
    for column in setting(frame):
        before = signature(frame, [] if column in _PRIMARY else shown)
        if frame[column].map(text).groupby(before).nunique().max() > 1:
            shown.append(column)
    return shown


def signature(frame: pd.DataFrame, columns: list[str]) -> pd.Series:
    """A text a row that is the same for rows with the same values in `columns`."""
    return pd.Series(["\n".join(map(text, row)) for row in frame[columns].to_numpy(object)], frame.index, dtype=object)


def used_runs(frame: pd.DataFrame, apart: Iterable[str] = ()) -> pd.DataFrame:
    """`frame` in the order of the tables, with a `label` and a `family` for each run.

    A label is the method with those knobs that vary among its runs (`fedran rank=512 complement=floor`); a family
    leaves the numeric ones out (`fedran complement=floor`). Where one configuration has a seed more than once (made by
    different versions of the code, or with another `evaluate_rounds`), only the newest of these runs is kept, of those
    that know their best round if there are any, and a warning says so.

    Args:
        apart: knobs that labels leave out, since the table has columns for them.
    """
    frame = pd.concat(_named(runs, set(apart)) for _, runs in frame.groupby("method"))
    configuration = [*setting(frame), "method", *knobs(frame)]
    frame = frame.sort_values("written", kind="stable")
    # Beside the same results, they say more.
    frame = frame.sort_values("A_T_best", key=pd.Series.notna, kind="stable")
    key = signature(frame, [*configuration, "seed"])
    for _, runs in frame[key.duplicated(keep=False)].groupby(signature(frame, configuration), sort=False):
        log.warning(
            "%s: seed %s was run more than once with one configuration (%s); only the newest%s counts",
            runs["label"].iloc[0],
            ", ".join(map(text, sorted(runs["seed"].unique()))),
            ", ".join(runs["run_id"]),
            " with evaluate_rounds" if runs["A_T_best"].notna().any() else "",
        )
    frame = frame[~key.duplicated(keep="last")]
    ranks = [tuple(map(_rank, row)) for row in frame[[*configuration, "seed"]].to_numpy(object)]
    return frame.iloc[sorted(range(len(frame)), key=ranks.__getitem__)].reset_index(drop=True)


def summarise(runs: pd.DataFrame) -> pd.DataFrame:
    """Group what `used_runs` returned over seeds.

    Returns:
        `label`, `family`, the configuration, `n`, `seeds`, `run_ids`, and of every measure `<measure>_mean` and
        `<measure>_std`: the standard deviation with n - 1, NaN for a single run; both NaN where a run has no value.
    """
    configuration = [*setting(runs), "method", *knobs(runs)]
    rows: list[dict[str, Any]] = []
    for _, group in runs.groupby(signature(runs, configuration), sort=False):
        row = {column: group[column].iloc[0] for column in ("label", "family", *configuration)}
        row |= {"n": len(group), "seeds": list(group["seed"]), "run_ids": list(group["run_id"])}
        for measure in (*MEASURES, *filter(by_task, runs)):
            values = group[measure].to_numpy(float)
            row[f"{measure}_mean"] = values.mean()
            row[f"{measure}_std"] = values.std(ddof=1) if len(values) > 1 else np.nan
        rows.append(row)
    return pd.DataFrame(rows)


def _named(runs: pd.DataFrame, apart: set[str]) -> pd.DataFrame:
    """The runs of one method with their labels and families."""
    varying = [knob for knob in knobs(runs) if knob not in apart and runs[knob].map(text).nunique() > 1]

    def name(row: pd.Series, numbers: bool) -> str:
        shown = [knob for knob in varying if text(row[knob]) and (numbers or not is_number(row[knob]))]
        return " ".join([row["method"], *(f"{knob.removeprefix('method.')}={text(row[knob])}" for knob in shown)])

    return runs.assign(
        label=[name(row, numbers=True) for _, row in runs.iterrows()],
        family=[name(row, numbers=False) for _, row in runs.iterrows()],
    )


def _rank(value: Any) -> tuple[int, float, str]:
    """Sorts numbers by size, then texts by letters."""
    return (0, float(value), "") if is_number(value) else (1, 0.0, text(value))
