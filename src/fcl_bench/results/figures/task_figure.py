"""The picture of accuracy over the task stream: a line a configuration, with a band over seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fcl_bench.results.figures.canvas import canvas, legend, title
from fcl_bench.results.figures.curves import accuracy_curves
from fcl_bench.results.figures.selection import lines, names, panels, seeds_told, shared, styles
from fcl_bench.results.figures.style import CEILINGS

_COLUMNS = 2


def accuracy_over_tasks(summary: pd.DataFrame, folder_of: Callable[[str], Path]) -> Figure:
    """A panel a setting: mean over seeds of A_t, on all classes seen up to task t, and a band of one deviation.

    Args:
        summary: what `summarise` returned.
        folder_of: from a run id to its folder.
    """
    shown, left_out = panels(summary)
    shown, fewer = lines(shown)
    rows = pd.concat([panel.rows for panel in shown])
    looks, named = styles(rows), names(rows)
    caption = [
        "Accuracy on all classes seen so far, after each task.",
        f"Line: mean over seeds; band: one standard deviation either way; {seeds_told(rows)}.",
        *(shared(rows), fewer, left_out),
    ]
    figure, grid = canvas(len(shown), _COLUMNS, caption, height=3.9 if len(shown) <= _COLUMNS else 3.3)
    for axes, panel in zip(grid, shown, strict=True):
        for _, row in panel.rows.iterrows():
            curves = accuracy_curves([folder_of(run) for run in row["run_ids"]])
            tasks = np.arange(1, curves.shape[1] + 1)
            look = looks[row["label"]]
            middle = curves.mean(axis=0)
            axes.plot(tasks, middle, **look)
            if len(curves) > 1:
                spread = curves.std(axis=0, ddof=1)
                axes.fill_between(tasks, middle - spread, middle + spread, color=look["color"], alpha=0.18, linewidth=0)
        title(axes, panel.title, min(_COLUMNS, len(shown)))
        axes.set_xlabel("task")
        axes.set_ylabel("accuracy, $A_t$ (%)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    ends = {label: f"{named[label]}{' (ceiling)' if named[label].split()[0] in CEILINGS else ''}" for label in looks}
    legend(figure, {ends[label]: look for label, look in looks.items()})
    return figure
