"""The figure of a comparison: accuracy over tasks, and its cost in bytes, one column per setting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from fcl_bench.results.figures.canvas import (
    ACCURACIES,
    Drawing,
    accuracy_axis,
    canvas,
    caption,
    legend,
    percent_axes,
    share,
    title,
)
from fcl_bench.results.figures.costs import COSTS, log_bars, log_costs
from fcl_bench.results.figures.curves import coincidences, draw_curves, references
from fcl_bench.results.figures.selection import lines, named_looks, names, panels, seeds_text, shared, styles
from fcl_bench.results.figures.style import CEILING_LOOKS, SMALL_SIZE, Look
from fcl_bench.results.summarise import CEILINGS

_MOST_PANELS = 4


def comparison(summary: pd.DataFrame, folders: Mapping[str, Path], reference: str = "") -> Drawing:
    """Draw A_t over tasks above A_avg against the upload of the busiest client and task (log), one column per setting.

    The panels of a row share their axes, so that settings compare by eye. Ceilings are dotted lines, since they have no
    position on the axis of bytes.

    Args:
        summary: the result of `compared`, for streams of two tasks or more.
        folders: run id -> its folder.
        reference: the configuration that is subtracted from all others in the upper row; "" for none.

    Raises:
        UserError: see `references`.
    """
    shown, left_out = panels(summary, most=_MOST_PANELS)
    base = references(shown, folders, reference) if reference else {}
    shown, fewer = lines([panel for panel in shown if not reference or panel.title in base])
    rows = pd.concat([panel.rows for panel in shown])
    looks, columns = styles(rows), len(shown)
    figure, grid = canvas(2 * columns, columns, [], height=2.7 if columns > 1 else 3.3)
    above, below = grid[:columns], grid[columns:]
    alike: list[list[str]] = []
    for upper, lower, panel in zip(above, below, shown, strict=True):
        alike += draw_curves(upper, panel, folders, looks, base.get(panel.title))
        title(upper, panel.title, columns)
        _costs(lower, panel.rows, looks)
    rivals = rows[~rows["method"].isin(CEILINGS)]
    for axes in below:
        log_costs(axes, rivals["up_max_mib_mean"])
    (share if reference else percent_axes)(above)
    percent_axes(below)
    above[0].set_ylabel(accuracy_axis(reference))
    below[0].set_ylabel(ACCURACIES["A_avg"])
    # The label is a third as long as the width: with more than two panels, only one of them has it.
    for axes in below if columns <= 2 else [below[columns // 2]]:
        axes.set_xlabel(COSTS["bytes"][1])
    less = f", less that of {reference}" if reference else ""
    figure.caption = caption(
        f"Above: accuracy on all classes seen so far, after each task{less}.",
        "Line: mean over seeds; band: one standard deviation either way.",
        "Below: mean accuracy over tasks against the measured upload of the busiest client and task.",
        f"Bars: one standard deviation either way; {seeds_text(rows)}.",
        coincidences(alike, names(rows)),
        shared(rows),
        fewer,
        left_out,
    )
    legend(figure, named_looks(rows))
    return figure


def _costs(axes: Axes, rows: pd.DataFrame, looks: Mapping[str, Look]) -> None:
    """Draw a point for each configuration that has sent something, and a dotted line for each ceiling."""
    for _, row in rows.iterrows():
        height, size = row["A_avg_mean"], row["up_max_mib_mean"]
        if row["method"] in CEILINGS:
            axes.axhline(height, **CEILING_LOOKS[row["method"]])
        elif size > 0 and pd.notna(height):
            bars = [row[f"{name}_std"] for name in ("A_avg", "up_max_mib")]
            up, across = (None if pd.isna(bar) or bar == 0 else bar for bar in bars)
            if across is not None:
                across = log_bars(pd.Series([size]), pd.Series([across]))
            axes.errorbar(size, height, up, across, capsize=2, **{**looks[row["label"]], "linestyle": "none"})
    axes.tick_params(labelsize=SMALL_SIZE)
