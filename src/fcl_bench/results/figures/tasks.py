"""Figures over the task stream: accuracy after each task, and the accuracy matrix."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from fcl_bench.execution.pictures import matrix_panel
from fcl_bench.results.figures.canvas import Drawing, canvas, caption, drawing, title
from fcl_bench.results.figures.curves import Curves, mean_matrix
from fcl_bench.results.figures.selection import select

_CURVE_COLUMNS, _MATRIX_COLUMNS = 2, 3
_MOST_MATRICES = 8


def accuracy_over_tasks(summary: pd.DataFrame, folders: Mapping[str, Path], reference: str = "") -> Drawing:
    """Draw one panel per setting: mean over seeds of A_t, on all classes seen up to task t, with one deviation's band.

    Args:
        summary: the result of `summarise`.
        folders: run id -> its folder.
        reference: the configuration that is subtracted from all others; "" for none.

    Raises:
        UserError: see `Curves`.
    """
    curves = Curves(summary, folders, reference)
    shown = select(curves.rows)
    figure = drawing(shown, curves.about, [partial(curves.draw, shown.looks)], _CURVE_COLUMNS)
    curves.finish(figure, figure.axes)
    return figure


def accuracy_matrices(summary: pd.DataFrame, folders: Mapping[str, Path]) -> Drawing:
    """Draw one heat map per configuration of the setting with the most: mean over seeds of a[t, tau] in percent.

    Args:
        summary: the result of `summarise`, for streams of two tasks or more.
        folders: run id -> its folder.
    """
    shown = select(summary, most_panels=1, most_lines=_MOST_MATRICES)
    figure, grid = canvas(len(shown.rows), _MATRIX_COLUMNS, height=3.4)
    what = "Accuracy (%) on the test samples of each task (column), after each task (row). Mean over seeds."
    figure.caption = caption(what, *shown.notes)
    means = [mean_matrix(runs, folders) for runs in shown.rows["run_ids"]]
    low, high = min(map(np.nanmin, means)), max(map(np.nanmax, means))
    for axes, matrix, label in zip(grid, means, shown.rows["label"], strict=True):
        image = matrix_panel(axes, matrix, low, high)
        title(axes, label, min(_MATRIX_COLUMNS, len(means)) + 1)
    shrink = 0.8 if len(means) <= _MATRIX_COLUMNS else 0.5
    figure.colorbar(image, ax=grid, label="accuracy (%)", shrink=shrink, pad=0.01)
    return figure
