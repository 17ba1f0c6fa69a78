"""How far features move, and what that costs (FedRAN Fig. 2, left and middle)."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

#: Tasks that get a line of their own; of a longer stream, so many spread over it.
_LINES = 6


def drift_figure(title: str, drift: np.ndarray, accuracy: np.ndarray) -> Figure:
    """Left: drift of each task's reference samples against the task learnt last; right: accuracy against drift.

    Args:
        title: of the whole figure.
        drift: (T, T) row s, column tau; NaN above the diagonal.
        accuracy: (T, T) in percent, likewise.
    """
    tasks = len(drift)
    shown = sorted({round(t) for t in np.linspace(0, tasks - 2, min(_LINES, tasks - 1))})
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    lines, scatter = figure.subplots(1, 2)
    figure.suptitle(title)
    for number, tau in enumerate(shown):
        style = {"color": _shade(number, len(shown)), "marker": "os^Dvp"[number % 6], "label": f"task {tau + 1}"}
        lines.plot(np.arange(tau, tasks) + 1, drift[tau:, tau], **style)
        scatter.plot(drift[tau:, tau], accuracy[tau:, tau], linewidth=0.8, **style)
    lines.set_xlabel("after task")
    lines.set_ylabel(r"drift of features, mean $\Vert g_s(x) - g_\tau(x)\Vert_2$")
    lines.set_xticks(np.arange(1, tasks + 1)[:: max(1, tasks // 10)])
    scatter.set_xlabel("drift of the task's features")
    scatter.set_ylabel("accuracy on the task (%)")
    for axes in (lines, scatter):
        axes.grid(alpha=0.3)
    # Accuracy falls as drift grows: up there is room.
    scatter.legend(title="reference samples of", loc="upper right")
    return figure


def _shade(number: int, of: int) -> tuple[float, float, float, float]:
    import matplotlib

    colour: tuple[float, float, float, float] = matplotlib.colormaps["viridis"](0.9 * number / max(1, of - 1))
    return colour
