"""The picture of a run: accuracy over the stream, and the accuracy matrix."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure


def accuracy_figure(title: str, pooled: list[float | None], matrix: np.ndarray, classes_seen: list[int]) -> Figure:
    """Left: A_t on all classes seen (pooled) against the task; right: a[t, tau] as a heat map.

    Args:
        title: of the whole figure.
        pooled: [A_1..A_T] in percent; None where a task has no test sample.
        matrix: (T, T) in percent, NaN above the diagonal.
        classes_seen: C_t per task.
    """
    tasks = np.arange(1, len(pooled) + 1)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    curve, heat = figure.subplots(1, 2, width_ratios=(1.25, 1))
    figure.suptitle(title)

    curve.plot(tasks, np.array(pooled, dtype=float), marker="o", color="#1f4e79", label="all classes seen, $A_t$")
    curve.plot(tasks, np.diag(matrix), marker="s", color="#c55a11", linestyle="--", label="newest task, $a_{t,t}$")
    curve.set_xlabel("task (classes seen)")
    ticks = tasks[:: max(1, len(tasks) // 10)]
    curve.set_xticks(ticks, [f"{t}\n({classes_seen[t - 1]})" for t in ticks])
    curve.set_ylabel("accuracy (%)")
    curve.grid(alpha=0.3)
    curve.legend()

    image = heat.imshow(matrix, cmap="viridis", vmin=np.nanmin(matrix), vmax=np.nanmax(matrix))
    heat.set_xlabel("test set of task")
    heat.set_ylabel("after task")
    heat.set_xticks(ticks - 1, ticks)
    heat.set_yticks(ticks - 1, ticks)
    if len(tasks) <= 10:
        middle = (np.nanmin(matrix) + np.nanmax(matrix)) / 2
        for (row, column), value in np.ndenumerate(matrix):
            if not np.isnan(value):
                shade = "white" if value < middle else "black"
                heat.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=shade)
    figure.colorbar(image, ax=heat, label="accuracy (%)")
    return figure
