"""Figures over the task stream: accuracy after each task, and the accuracy matrix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from fcl_bench.execution.pictures import matrix_panel
from fcl_bench.results.figures.canvas import Drawing, accuracy_axis, canvas, caption, legend, percent_axes, share, title
from fcl_bench.results.figures.curves import coincidences, draw_curves, mean_matrix, references
from fcl_bench.results.figures.selection import lines, named_looks, names, panels, seeds_text, shared, styles

_CURVE_COLUMNS, _MATRIX_COLUMNS = 2, 3
_MOST_MATRICES = 8


def accuracy_over_tasks(summary: pd.DataFrame, folders: Mapping[str, Path], reference: str = "") -> Drawing:
    """Draw one panel per setting: mean over seeds of A_t, on all classes seen up to task t, with one deviation's band.

    Args:
        summary: the result of `summarise`.
        folders: run id -> its folder.
        reference: the configuration that is subtracted from all others; "" for none.

    Raises:
        UserError: see `references`.
    """
    shown, left_out = panels(summary)
    base = references(shown, folders, reference) if reference else {}
    shown, fewer = lines([panel for panel in shown if not reference or panel.title in base])
    rows = pd.concat([panel.rows for panel in shown])
    looks = styles(rows)
    figure, grid = canvas(len(shown), _CURVE_COLUMNS, [], height=3.9 if len(shown) <= _CURVE_COLUMNS else 3.3)
    alike: list[list[str]] = []
    for axes, panel in zip(grid, shown, strict=True):
        alike += draw_curves(axes, panel, folders, looks, base.get(panel.title))
        title(axes, panel.title, min(_CURVE_COLUMNS, len(shown)))
        axes.set_ylabel(accuracy_axis(reference))
    (share if reference else percent_axes)(grid)
    figure.caption = caption(
        f"Accuracy on all classes seen so far, after each task{f', less that of {reference}' if reference else ''}.",
        f"Line: mean over seeds; band: one standard deviation either way; {seeds_text(rows)}.",
        coincidences(alike, names(rows)),
        shared(rows),
        fewer,
        left_out,
    )
    legend(figure, named_looks(rows))
    return figure


def accuracy_matrices(summary: pd.DataFrame, folders: Mapping[str, Path]) -> Drawing:
    """Draw one heat map per configuration of the setting with the most: mean over seeds of a[t, tau] in percent.

    Args:
        summary: the result of `summarise`, for streams of two tasks or more.
        folders: run id -> its folder.
    """
    blocks, left_out = panels(summary, most=1)
    [shown], fewer = lines(blocks, most=_MOST_MATRICES)
    rows = shown.rows
    named = names(rows)
    notes = [
        "Accuracy (%) on the test samples of each task (column), after each task (row).",
        f"Mean over seeds; {seeds_text(rows)}.",
        *(shared(rows), fewer, left_out),
    ]
    figure, grid = canvas(len(rows), _MATRIX_COLUMNS, notes, height=3.4)
    means = [mean_matrix(runs, folders) for runs in rows["run_ids"]]
    low, high = min(np.nanmin(matrix) for matrix in means), max(np.nanmax(matrix) for matrix in means)
    columns = min(_MATRIX_COLUMNS, len(rows))
    for axes, matrix, label in zip(grid, means, rows["label"], strict=True):
        image = matrix_panel(axes, matrix, low, high)
        title(axes, named[label], columns + 1)
    shrink = 0.8 if len(rows) <= _MATRIX_COLUMNS else 0.5
    figure.colorbar(image, ax=grid, label="accuracy (%)", shrink=shrink, pad=0.01)
    return figure
