"""The figures of accuracy against one quantity: rank, label rate, beta, number of clients, epsilon."""

from __future__ import annotations

from functools import partial

import pandas as pd
from matplotlib.axes import Axes

from fcl_bench.config import is_number
from fcl_bench.results.figures.canvas import ACCURACIES, Drawing, drawing, ticks
from fcl_bench.results.figures.selection import Panel, select
from fcl_bench.results.summarise import setting, signature

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
    moves = (
        ((lines.transform("max") - lines.transform("min")) > 1e-9).any(axis=1).groupby(rows["label"], sort=False).any()
    )
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
