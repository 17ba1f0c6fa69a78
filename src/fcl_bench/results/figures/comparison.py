"""The figure of a comparison: accuracy over tasks, and its cost in bytes, one column per setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from fcl_bench.results.figures.canvas import ACCURACIES, Drawing, drawing
from fcl_bench.results.figures.costs import COSTS, draw_ceilings, draw_line, log_costs
from fcl_bench.results.figures.curves import Curves
from fcl_bench.results.figures.selection import Panel, select
from fcl_bench.results.figures.style import SMALL_SIZE
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
        UserError: see `Curves`.
    """
    curves = Curves(summary, folders, reference)
    shown = select(curves.rows, most_panels=_MOST_PANELS)
    columns, sizes = len(shown.panels), shown.rows.loc[~shown.rows["method"].isin(CEILINGS), "up_max_mib_mean"]

    def costs(axes: Axes, panel: Panel) -> None:
        draw_ceilings(axes, panel, "A_avg")
        for label, rows in panel.rows[~panel.rows["method"].isin(CEILINGS)].groupby("label", sort=False):
            draw_line(axes, rows, ("up_max_mib", "A_avg"), {**shown.looks[label], "linestyle": "none"})
        axes.tick_params(labelsize=SMALL_SIZE)
        axes.set_ylabel(ACCURACIES["A_avg"])
        axes.set_xlabel(COSTS["bytes"][1])
        log_costs(axes, sizes)

    about = [
        f"Above: {curves.about[0][0].lower()}{curves.about[0][1:]}",
        "Below: mean accuracy over tasks against the measured upload of the busiest client and task.",
        "Line and point: mean over seeds; band and bars: one standard deviation either way.",
    ]
    draws: list[Callable[[Axes, Panel], None]] = [partial(curves.draw, shown.looks), costs]
    figure = drawing(shown, about, draws, height=2.7 if columns > 1 else 3.3, settings_across=True)
    for number, axes in enumerate(figure.axes):
        if number % columns:
            axes.set_ylabel("")
        # The label of bytes is a third as long as the width: with more than two panels, only one of them has it.
        if number >= columns > 2 and number % columns != columns // 2:
            axes.set_xlabel("")
    curves.finish(figure, figure.axes[:columns])
    return figure
