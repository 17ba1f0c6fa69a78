"""The picture of the accuracy matrix: what each configuration still knows of each task, after each task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fcl_bench.results.figures.canvas import canvas, title
from fcl_bench.results.figures.curves import accuracy_matrices
from fcl_bench.results.figures.selection import lines, names, panels, seeds_told, shared
from fcl_bench.results.figures.style import COLOUR_MAP

_COLUMNS = 3
_MOST = 8
#: Beyond it the numbers would be too small to read; the shades tell.
_MOST_NUMBERED = 10


def accuracy_matrices_figure(summary: pd.DataFrame, folder_of: Callable[[str], Path]) -> Figure:
    """A heat map a configuration, of the setting with the most of them: the mean over seeds of a[t, tau] in percent.

    Args:
        summary: what `summarise` returned, for streams of two tasks or more.
        folder_of: from a run id to its folder.
    """
    blocks, left_out = panels(summary, most=1)
    [shown], fewer = lines(blocks, most=_MOST)
    rows = shown.rows
    named = names(rows)
    caption = [
        "Accuracy (%) on the test samples of each task (column), after each task (row).",
        f"Mean over seeds; {seeds_told(rows)}.",
        *(shared(rows), fewer, left_out),
    ]
    figure, grid = canvas(len(rows), _COLUMNS, caption, height=3.4)
    means = [accuracy_matrices([folder_of(run) for run in runs]).mean(axis=0) for runs in rows["run_ids"]]
    low, high = min(np.nanmin(matrix) for matrix in means), max(np.nanmax(matrix) for matrix in means)
    columns = min(_COLUMNS, len(rows))
    for axes, matrix, label in zip(grid, means, rows["label"], strict=True):
        image = axes.imshow(matrix, cmap=COLOUR_MAP, vmin=low, vmax=high)
        axes.grid(False)
        _numbers(axes, matrix, (low + high) / 2)
        title(axes, named[label], columns + 1)
        axes.set_xlabel("test samples of task")
        axes.set_ylabel("after task")
        every = max(1, len(matrix) // _MOST_NUMBERED)
        ticks = np.arange(0, len(matrix), every)
        axes.set_xticks(ticks, [str(task + 1) for task in ticks])
        axes.set_yticks(ticks, [str(task + 1) for task in ticks])
    figure.colorbar(image, ax=grid, label="accuracy (%)", shrink=0.8 if len(rows) <= _COLUMNS else 0.5, pad=0.01)
    return figure


def _numbers(axes: Axes, matrix: np.ndarray, middle: float) -> None:
    if len(matrix) > _MOST_NUMBERED:
        return
    for (row, column), value in np.ndenumerate(matrix):
        if not np.isnan(value):
            shade = "white" if value < middle else "black"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7.5, color=shade)
