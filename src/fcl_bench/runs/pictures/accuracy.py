"""The picture of a run: accuracy over the stream, and the accuracy matrix."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fcl_bench.runs.pictures.ticks import name_tasks, task_ticks

#: Width and height, and the panels' left ends and widths, in inches. Constrained layout would find much the same
#: places, and lays the figure out and draws it twice for it, which doubles the time of a picture.
_SIZE = (10.0, 4.2)
_CURVE, _HEAT, _BAR = (0.75, 4.4), (5.85, 3.2), (9.17, 0.16)
_BOTTOM, _HEIGHT = 0.68, 3.2
#: Accuracies span as many points at least, so that their labels fit beside the axes (97.5, and not 97.4875).
_LEAST_SPAN = 5.0
#: Beyond it markers would cover each other and the lines.
_MOST_MARKED = 40


def accuracy_figure(title: str, pooled: list[float | None], matrix: np.ndarray, classes_seen: list[int]) -> Figure:
    """Left: A_t on all classes seen (pooled) against the task; right: a[t, tau] as a heat map.

    Args:
        title: of the whole figure.
        pooled: [A_1..A_T] in percent; None where a task has no test sample.
        matrix: (T, T) in percent, NaN above the diagonal.
        classes_seen: C_t per task.
    """
    tasks = np.arange(1, len(pooled) + 1)
    figure = Figure(figsize=_SIZE)
    curve, heat, bar = (_panel(figure, *place) for place in (_CURVE, _HEAT, _BAR))
    figure.suptitle(title, y=1 - 0.04 / _SIZE[1], va="top")

    newest = np.diag(matrix)
    circle, square = ("o", "s") if len(tasks) <= _MOST_MARKED else (None, None)
    curve.plot(tasks, np.array(pooled, dtype=float), marker=circle, color="#1f4e79", label="all classes seen, $A_t$")
    curve.plot(tasks, newest, marker=square, color="#c55a11", linestyle="--", label="newest task, $a_{t,t}$")
    curve.set_xlabel("task (classes seen)")
    ticks = task_ticks([f"({seen})" for seen in classes_seen], _CURVE[1])
    curve.set_xticks(ticks, [f"{t}\n({classes_seen[t - 1]})" for t in ticks])
    curve.set_ylabel("accuracy (%)")
    curve.set_ylim(_spanned(*curve.get_ylim()))
    curve.grid(alpha=0.3)
    curve.legend()

    low, high = _spanned(np.nanmin(matrix), np.nanmax(matrix))
    image = heat.imshow(matrix, cmap="viridis", vmin=low, vmax=high)
    heat.set_xlabel("test set of task")
    heat.set_ylabel("after task")
    name_tasks(heat, len(tasks), _HEAT[1])
    if len(tasks) <= 10:
        middle = (low + high) / 2
        for (row, column), value in np.ndenumerate(matrix):
            if not np.isnan(value):
                shade = "white" if value < middle else "black"
                heat.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=shade)
    figure.colorbar(image, cax=bar, label="accuracy (%)")
    return figure


def _spanned(low: float, high: float) -> tuple[float, float]:
    """The interval, made wider if it is too short: on both sides, but not into what no accuracy can be."""
    more = max(0.0, _LEAST_SPAN - (high - low)) / 2
    low, high = min(low, max(low - more, 0.0)), max(high, min(high + more, 100.0))
    return min(low, max(high - _LEAST_SPAN, 0.0)), max(high, min(low + _LEAST_SPAN, 100.0))


def _panel(figure: Figure, left: float, width: float) -> Axes:
    """Axes between these ends in inches; all panels have the same height."""
    return figure.add_axes((left / _SIZE[0], _BOTTOM / _SIZE[1], width / _SIZE[0], _HEIGHT / _SIZE[1]))
