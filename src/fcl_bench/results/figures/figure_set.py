"""Makes every figure for which a set of runs is sufficient; accuracy against one quantity is made here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from fcl_bench.config import is_number
from fcl_bench.results.figures.canvas import ACCURACIES, Drawing, drawing, ticks
from fcl_bench.results.figures.costs import COSTS, accuracy_against_cost, compared
from fcl_bench.results.figures.curves import accuracy_matrices, accuracy_over_rounds, accuracy_over_tasks
from fcl_bench.results.figures.selection import Panel, select
from fcl_bench.results.reference import is_own
from fcl_bench.results.summarise import setting, signature, summarise, used_runs

#: Quantity -> the label of its axis, and the base of its log scale.
SWEPT = {
    "rank": ("rank, r", 2),
    "label_rate": ("label rate: labelled fraction of the training samples", None),
    "beta": ("Dirichlet beta: the smaller, the more skewed the clients' classes", 10),
    "clients": ("clients, K", 10),
    "noise.epsilon": ("epsilon, for the noise in uploads", 2),
}


def swept(summary: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Return the rows of configurations that were run at two or more values of `quantity`, all else being equal.

    None if `quantity` changes the accuracy of none of them.
    """
    rows = summary[summary[quantity].map(is_number)] if quantity in summary else summary.iloc[:0]
    if rows.empty:
        return rows
    values = rows[quantity].astype(float).groupby(_line(rows, quantity)).transform("nunique")
    rows = rows[values > 1]
    return rows if len(_flat(rows, quantity)) < rows["label"].nunique() else rows.iloc[:0]


def _line(rows: pd.DataFrame, quantity: str) -> pd.Series:
    """Return, per row, what the points of its line have in common."""
    return signature(rows, [*(column for column in setting(rows) if column != quantity), "label"])


def _flat(rows: pd.DataFrame, quantity: str) -> list[str]:
    """Return the labels all of whose lines are flat, to rounding."""
    lines = rows[[f"{measure}_mean" for measure in ACCURACIES]].groupby(_line(rows, quantity))
    moved = (lines.transform("max") - lines.transform("min") > 1e-9).any(axis=1)
    moves = moved.groupby(rows["label"], sort=False).any()
    return list(moves.index[~moves])


def accuracy_against(summary: pd.DataFrame, quantity: str) -> Drawing:
    """Draw one row of panels per setting: A_avg and A_T at each value of `quantity`.

    Each point has one standard deviation over seeds.

    Args:
        summary: the result of `swept`, not empty.
        quantity: one of `SWEPT`.
    """
    shown = select(summary, [quantity], most_panels=4)
    label, log_base = SWEPT[quantity]

    def draw(measure: str, axes: Axes, panel: Panel) -> None:
        for name, line in panel.rows.groupby("label", sort=False):
            line = line.assign(**{quantity: line[quantity].astype(float)}).sort_values(quantity)
            spread = line[f"{measure}_std"].fillna(0)
            axes.errorbar(line[quantity], line[f"{measure}_mean"], spread, capsize=3, **shown.looks[name])
        axes.set_xlabel(label if len(label) < 50 else label.split(":")[0])
        axes.set_ylabel(ACCURACIES[measure])
        ticks(axes, list(panel.rows[quantity].astype(float)), log_base)

    about = [
        f"A line joins runs that differ in {quantity} only.",
        "Point: mean over seeds; bar: one standard deviation either way.",
    ]
    if flat := _flat(summary, quantity):
        about.append(f"Flat, since {quantity} does not change their accuracy: {', '.join(flat)}.")
    return drawing(shown, about, [partial(draw, measure) for measure in ACCURACIES])


def _name(quantity: str) -> str:
    """Return the name of the figure of accuracy against a quantity that was varied."""
    return f"accuracy_against_{quantity.removeprefix('noise.')}"


#: All figures, in reading order.
FIGURES = (
    *("accuracy_over_tasks", "accuracy_over_rounds"),
    *(f"accuracy_against_{cost}" for cost in COSTS),
    *map(_name, SWEPT),
    "accuracy_matrix",
)


def figure_set(runs: pd.DataFrame, folder: Path, wanted: Collection[str] = FIGURES) -> dict[str, Drawing]:
    """Return name -> figure, in the order of `FIGURES`; only those with runs, see docs/how-to/figures.md.

    Reference runs have no folder, so figures of curves and matrices leave them out.

    Args:
        runs: the result of `collect` or `beside`, after selection; of repeated runs only the newest counts.
        folder: the folder runs/, which holds the runs' folders.
        wanted: names of `FIGURES`; no other figure is drawn.
    """
    if runs.empty:
        return {}
    given, runs = runs, used_runs(runs)
    summary = summarise(runs)
    folders = {run: folder / name for run, name in zip(runs["run_id"], runs["folder"], strict=True) if name}
    with_curves = summary[is_own(summary)]
    streams = with_curves[with_curves["tasks"].astype(int) > 1]
    ways: dict[str, Callable[[], Drawing]] = {}
    if len(streams):
        ways["accuracy_over_tasks"] = partial(accuracy_over_tasks, streams, folders)
        ways["accuracy_matrix"] = partial(accuracy_matrices, streams, folders)
    tested = set(runs.loc[runs["A_T_best"].notna(), "run_id"])
    if any(tested.issuperset(ids) for ids in with_curves["run_ids"]):
        ways["accuracy_over_rounds"] = partial(accuracy_over_rounds, with_curves, folders)
    for cost, (measure, *_) in COSTS.items():
        if len(rivals := compared(summary[summary[f"{measure}_mean"].notna()])):
            ways[f"accuracy_against_{cost}"] = partial(accuracy_against_cost, rivals, cost)
    for quantity in (one for one in SWEPT if _name(one) in wanted):
        knob, whole = f"method.{quantity}", summary
        if knob in given and quantity not in given:
            # Like a key of the setting: labels leave it out, so that a line joins its values.
            used = given[given["run_id"].isin(runs["run_id"])]
            whole = summarise(used_runs(used.rename(columns={knob: quantity})))
        if len(rows := swept(whole, quantity)):
            ways[_name(quantity)] = partial(accuracy_against, rows, quantity)
    return {name: ways[name]() for name in FIGURES if name in ways and name in wanted}
