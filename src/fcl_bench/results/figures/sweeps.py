"""The figures of accuracy against one quantity of the setting: label rate, beta, number of clients, epsilon."""

from __future__ import annotations

from itertools import product

import pandas as pd

from fcl_bench.config import is_number
from fcl_bench.results.figures.canvas import ACCURACIES, Drawing, canvas, legend, percent_axes, ticks, title
from fcl_bench.results.figures.selection import lines, named_looks, panels, seeds_text, shared, styles
from fcl_bench.results.summarise import setting, signature

#: Quantity -> the label of its axis, and the base of its log scale.
SWEPT = {
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
    shown, left_out = panels(summary, [quantity], most=4)
    shown, fewer = lines(shown)
    rows = pd.concat([panel.rows for panel in shown])
    looks = styles(rows)
    label, log_base = SWEPT[quantity]
    notes = [
        f"A line joins runs that differ in {quantity} only. Point: mean over seeds; bar: one standard deviation",
        f"either way; {seeds_text(rows)}.",
        *(shared(rows), fewer, left_out),
    ]
    figure, grid = canvas(len(shown) * len(ACCURACIES), len(ACCURACIES), notes)
    for axes, (panel, measure) in zip(grid, product(shown, ACCURACIES), strict=True):
        for name, line in panel.rows.groupby("label", sort=False):
            line = line.assign(**{quantity: line[quantity].astype(float)}).sort_values(quantity)
            spread = line[f"{measure}_std"].fillna(0)
            axes.errorbar(line[quantity], line[f"{measure}_mean"], spread, capsize=3, **looks[name])
        title(axes, panel.title, len(ACCURACIES))
        axes.set_xlabel(label if len(label) < 50 else label.split(":")[0])
        axes.set_ylabel(ACCURACIES[measure])
        ticks(axes, list(panel.rows[quantity].astype(float)), log_base)
    for first in range(len(ACCURACIES)):
        percent_axes(grid[first :: len(ACCURACIES)])
    legend(figure, named_looks(rows))
    return figure
