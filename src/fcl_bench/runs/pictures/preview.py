"""The picture of a split: which client holds how much of which class in which task."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

#: Clients that get a column in each task; of more, the first so many are drawn.
_CLIENTS = 100
#: Columns of the whole picture that can still be told apart.
_COLUMNS = 2000
#: Tasks with a line between them.
_BORDERS = 200
#: Classes whose labels fit beside the picture.
_NAMED = 40


def preview_figure(title: str, cells: np.ndarray, class_order: np.ndarray, clients: int) -> Figure:
    """A heat map of training samples: a row a class, in order of appearance; the tasks side by side, in each a column a
    client; empty cells are white.

    Args:
        title: of the figure; how many clients are drawn is added where not all are.
        cells: (4, m) task, client, column and number of samples, where there are any.
        class_order: (C,) the labels of the columns.
        clients: K.
    """
    task, client, column, number = cells
    tasks, classes = int(task.max()) + 1, len(class_order)
    drawn = min(clients, _CLIENTS, max(1, _COLUMNS // tasks))
    if drawn < clients:
        title += f"\n(the first {drawn} of {clients} clients)"
    samples = np.zeros((classes, tasks, drawn))
    there = client < drawn
    samples[column[there], task[there], client[there]] = number[there]

    width, height = np.clip(tasks * drawn / 90, 8, 18), np.clip(classes / 24, 4, 12)
    figure = Figure(figsize=(width + 1.5, height + 1.2), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title)
    image = axes.imshow(
        np.ma.masked_equal(samples.reshape(classes, -1), 0),
        norm=LogNorm(1, max(2, number.max(initial=1))),
        cmap="viridis_r",
        aspect="auto",
        interpolation="nearest",
    )
    # More borders than that would hide what is between them.
    for border in np.arange(1, tasks) * drawn - 0.5 if tasks <= _BORDERS else ():
        axes.axvline(border, color="black", linewidth=0.6)
    ticks = np.arange(tasks)[:: max(1, tasks // 20)]
    axes.set_xticks((ticks + 0.5) * drawn - 0.5, ticks + 1)
    axes.set_xlabel(f"task, and in each its clients 1 to {drawn}")
    if classes <= _NAMED:
        axes.set_yticks(np.arange(classes), class_order, fontsize=8)
        axes.set_ylabel("class, in order of appearance")
    else:
        axes.set_ylabel("number of the class in order of appearance")
    figure.colorbar(image, ax=axes, label="training samples")
    return figure
