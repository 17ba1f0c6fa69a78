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
    """Return the rows of configurations that were run at two or more values of `quantity`, all else being equal."""
    rows = summary[summary[quantity].map(is_number)] if quantity in summary else summary.iloc[:0]
    if rows.empty:
        return rows
    others = [column for column in setting(rows) if column != quantity]
    values = rows[quantity].astype(float).groupby(signature(rows, [*others, "label"])).transform("nunique")
    return rows[values > 1]


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
    return drawing(shown, about, [partial(draw, measure) for measure in ACCURACIES])
