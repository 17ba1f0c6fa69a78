"""Groups runs over seeds: one row per method and setting, with means and standard deviations."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from fcl_bench.config import is_number, text
from fcl_bench.errors import UserError, choices
from fcl_bench.results.collect import RUN_COLUMNS
from fcl_bench.results.measures import MEASURES, by_task

log = logging.getLogger(__name__)

#: The method that sees all data at once: a ceiling, not a competitor.
CEILING = "centralised_ridge"
#: All ceilings, including the method that trains the network on all data.
CEILINGS = (CEILING, "centralised_softmax", "centralised")
#: What tables say beside their marks of the best.
NO_PART = (
    f"The ceilings ({', '.join(CEILINGS)}), which see all data in one place, and rows that meet a gate take no part."
)

#: The method by which the first tasks of others are judged, and what must be alike for that, beside setting and seed.
YARDSTICK = "fedavg"
_BUDGET = ("method.trains", "method.training.rounds", "method.training.epochs")
#: How many runs a warning lists.
_LISTED = 4
#: Which part of its accuracy is too little, and by how many standard deviations it must be less.
_TOO_LITTLE, _SURE = 0.5, 2.0

#: Columns of the setting that are shown wherever they vary; others are shown only if these do not determine them.
_PRIMARY = (
    *("data", "backbone", "split", "partition", "beta", "clients", "tasks"),
    *("label_rate", "adapt", "faults", "noise", "secure", "protocol", "dtype"),
    *("wire.dtype", "wire.factors", "device"),
)

#: Columns of the setting whose values never share a panel, and what would share it.
_NEVER_TOGETHER = {
    "device": "numbers of two devices",
    "protocol": "numbers of two protocols",
    "tasks": "streams of two lengths",
}


def knobs(frame: pd.DataFrame) -> list[str]:
    """Return the columns that hold the methods' knobs."""
    return [column for column in frame if column.startswith("method.")]


def setting(frame: pd.DataFrame) -> list[str]:
    """Return the columns that describe the problem: the whole configuration except the method."""
    results = {"label", "family", "n", "seeds", "run_ids", "values", "folders", *RUN_COLUMNS, *MEASURES}
    results |= {f"{measure}_{part}" for measure in MEASURES for part in ("mean", "std")}
    others = {*results, *_PRIMARY, "method", *knobs(frame)}
    rest = [column for column in frame if column not in others]
    rest = [column for column in rest if not by_task(re.sub("_(mean|std)$", "", column))]
    return [column for column in _PRIMARY if column in frame] + rest


def split_by_setting(frame: pd.DataFrame, keys: Iterable[str]) -> pd.DataFrame:
    """Treat `keys` of the setting as knobs, so that they distinguish methods: rows that differ in them share a panel.

    Raises:
        UserError: a key does not belong to the setting, or its values never share a panel.
    """
    known = [key for key in setting(frame) if key not in _NEVER_TOGETHER]
    for key in keys:
        if key in _NEVER_TOGETHER:
            why = f"{_NEVER_TOGETHER[key]} never share a panel"
            raise UserError(f"--together {key}: {why}", f"another key, or --where {key}=VALUE for one alone")
        if key not in known:
            raise UserError(f"--together {key} is no key of the setting", choices(known, key))
    return frame.rename(columns={key: f"method.{key}" for key in keys})


def varying_setting(frame: pd.DataFrame) -> list[str]:
    """Return the columns of the setting that vary, without minor ones that follow from those before them."""
    shown: list[str] = []
    for column in setting(frame):
        values = frame[column].map(text)
        if values.nunique() < 2:
            continue
        if column in _PRIMARY or values.groupby(signature(frame, shown)).nunique().max() > 1:
            shown.append(column)
    return shown


def signature(frame: pd.DataFrame, columns: list[str]) -> pd.Series:
    """Return one text per row, the same for rows with the same values in `columns`."""
    return pd.Series(["\n".join(map(text, row)) for row in frame[columns].to_numpy(object)], frame.index, dtype=object)


def used_runs(frame: pd.DataFrame, apart: Iterable[str] = ()) -> pd.DataFrame:
    """Return `frame` in the order of the tables, with a `label` and a `family` for each run.

    A label is the method with the knobs that vary among its runs (`fedran rank=512 complement=floor`); a family leaves
    out the numeric knobs (`fedran complement=floor`). If one configuration has a seed more than once (made by different
    versions of the code, or with another `evaluate_rounds`), only the newest of these runs is kept, and a warning says
    so; runs that know their best round are preferred, and of these the ones that tested the most rounds.

    Args:
        apart: knobs that labels leave out because the table has columns for them.
    """
    frame = labelled(frame, apart)
    configuration = [*setting(frame), "method", *knobs(frame)]
    frame = frame.sort_values("written", kind="stable")
    # Their results are the same, and they say more.
    every = frame["evaluate_rounds"].astype(float).clip(lower=1) if "evaluate_rounds" in frame else 1.0
    tested = (frame["A_T_best"].notna() / every).fillna(0.0)
    frame = frame.iloc[tested.to_numpy().argsort(kind="stable")]
    key = signature(frame, [*configuration, "seed"])
    repeated = frame.loc[key.duplicated(keep="last"), ["label", "seed", "run_id"]].to_numpy(object)
    if len(repeated):
        log.warning(
            "not counted, since a run of the same configuration and seed is newer or tested more rounds: %s%s",
            "; ".join(f"{label}, seed {text(seed)} ({run})" for label, seed, run in repeated[:_LISTED]),
            f"; and {len(repeated) - _LISTED} more" if len(repeated) > _LISTED else "",
        )
    frame = frame[~key.duplicated(keep="last")]
    varying = [column for column in [*configuration, "seed"] if frame[column].map(text).nunique() > 1]
    ranks = [tuple(map(_rank, row)) for row in frame[varying].to_numpy(object)]
    return _judged(frame.iloc[sorted(range(len(frame)), key=ranks.__getitem__)].reset_index(drop=True))


def _judged(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs, with the gate `first_task` where the first task is far below FedAvg's.

    The accuracy right after the first task is less than half of the best FedAvg run's of the same setting, seed and
    budget, and less by more than two standard deviations of their difference, as independent test samples have it.
    What has no budget, such as a closed form, is held against every budget; each run is judged for itself.
    """
    rivals = runs["method"] == YARDSTICK
    if "first_task" not in runs or not rivals.any():
        return runs
    runs = runs.assign(gates=runs["gates"].map(text), gate_texts=runs["gate_texts"].map(text))
    problem = signature(runs, [*setting(runs), "seed"])
    budget = signature(runs, [column for column in _BUDGET if column in runs])
    first = runs["first_task"].astype(float)
    every = first[rivals].groupby(problem).max().to_dict()
    alike = first[rivals].groupby([problem, budget]).max().to_dict()
    for place, own in first.items():
        kind = problem[place], budget[place]
        best = alike.get(kind, np.nan) if kind[1].strip() else every.get(kind[0], np.nan)
        if gate := first_task_gate(own, best, runs["first_samples"][place]):
            for column, new, mark in (("gates", "first_task", ", "), ("gate_texts", gate, "; ")):
                runs.loc[place, column] = mark.join(filter(None, [runs.loc[place, column], new]))
    return runs


def first_task_gate(own: float, best: float, samples: int) -> str:
    """Return in words that a first task is far below FedAvg's (see `_judged`); "" where it is not, or best is NaN.

    Args:
        own, best: the accuracies right after it, in percent, of the run and of FedAvg.
        samples: how many test samples it has.
    """
    shares = np.array([own, best]) / 100
    deviation = np.sqrt((shares * (1 - shares)).sum() / samples)
    if not (own < _TOO_LITTLE * best and shares[1] - shares[0] > _SURE * deviation):
        return ""
    return f"first_task (task 1): {own:.1f} % of its samples are right, FedAvg's {best:.1f} %"


def summarise(runs: pd.DataFrame) -> pd.DataFrame:
    """Group the result of `used_runs` over seeds.

    Returns:
        `label`, `family`, the configuration, `n`, `seeds`, `run_ids`, `gates` that any of the runs meets, their
        `gate_texts`, and for every measure `<measure>_mean` and `<measure>_std`: the standard deviation with n - 1,
        NaN for a single run; both are NaN if a run has no value.
        Those of `A_T_best` are NaN too if the runs tested different rounds, of which they chose the best.
        For comparisons `values` (measure -> numbers) and `folders`, both in the order of `seeds`.
    """
    configuration = [*setting(runs), "method", *knobs(runs)]
    kinds = pd.factorize(signature(runs, configuration))[0]
    groups = [np.flatnonzero(kinds == kind) for kind in range(kinds.max(initial=-1) + 1)]
    first = runs[["label", "family", *configuration]].iloc[[places[0] for places in groups]]
    numbers = {measure: runs[measure].to_numpy(float) for measure in (*MEASURES, *filter(by_task, runs))}
    known = runs.filter(items=RUN_COLUMNS)
    rows: list[dict[str, Any]] = []
    for row, places in zip(first.to_dict("records"), groups, strict=True):
        group = known.iloc[places]
        row |= {"n": len(group), "seeds": list(group["seed"]), "run_ids": list(group["run_id"])}
        row |= {"values": {}, "folders": list(group["path"])}
        row["gates"] = gates_of(group)
        by_seed = zip(group["seed"], map(text, group.get("gate_texts", [])), strict=False)
        row["gate_texts"] = "; ".join(f"seed {seed}: {texts}" for seed, texts in by_seed if texts)
        for measure, values in numbers.items():
            values = values[places]
            if measure == "A_T_best" and "evaluate_rounds" in group and group["evaluate_rounds"].nunique() > 1:
                values = np.full(len(group), np.nan)
            row["values"][measure] = values
            row[f"{measure}_mean"] = values.mean()
            row[f"{measure}_std"] = values.std(ddof=1) if len(values) > 1 else np.nan
        rows.append(row)
    return pd.DataFrame(rows)


def gates_of(runs: pd.DataFrame) -> str:
    """Return the gates that any of the runs meets; "" for none."""
    met = runs.get("gates", [])  # reference tables have none, or empty cells
    return ", ".join(sorted({gate for gates in map(text, met) for gate in gates.split(", ") if gate}))


def labelled(frame: pd.DataFrame, apart: Iterable[str] = ()) -> pd.DataFrame:
    """Return the runs, method by method, with their labels and families; see `used_runs`."""
    return pd.concat(_named(runs, set(apart)) for _, runs in frame.groupby("method"))


def _named(runs: pd.DataFrame, apart: set[str]) -> pd.DataFrame:
    """Return the runs of one method with their labels and families."""
    there = runs.dropna(axis="columns", how="all")  # most knobs are of other methods
    varying = [knob for knob in knobs(there) if knob not in apart and runs[knob].map(text).nunique() > 1]
    rows = list(zip(runs["method"], runs[varying].to_numpy(object), strict=True))

    def name(method: str, values: np.ndarray, numbers: bool) -> str:
        named = zip(varying, values, strict=True)
        shown = [(knob, text(value)) for knob, value in named if numbers or not is_number(value)]
        return " ".join([method, *(f"{knob.removeprefix('method.')}={value}" for knob, value in shown if value)])

    return runs.assign(
        label=[name(*row, numbers=True) for row in rows], family=[name(*row, numbers=False) for row in rows]
    )


def _rank(value: Any) -> tuple[int, float, str]:
    """Return a sort key: numbers by size, then texts alphabetically."""
    return (0, float(value), "") if is_number(value) else (1, 0.0, text(value))
