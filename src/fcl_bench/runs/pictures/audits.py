"""What the audits of a run saw: how far features move, and what projection leaves of gradients."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from fcl_bench.runs.pictures.ticks import name_tasks

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
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(shown)))
    for tau, shade, marker in zip(shown, shades, "os^Dvp"[: len(shown)], strict=True):
        style = {"color": shade, "marker": marker, "label": f"task {tau + 1}"}
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


def theory_figure(title: str, rows: list[dict[str, float | None]]) -> Figure:
    """Left: rho_t, mean and least over the rounds of each task; right: beta_{tau -> t} as a heat map.

    Args:
        title: of the whole figure.
        rows: per task, what `ProjectionAudit` reported.
    """
    tasks = np.arange(1, len(rows) + 1)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    adequacy, interference = figure.subplots(1, 2, width_ratios=(1.25, 1))
    figure.suptitle(title)
    looks = (("rho", "mean over rounds", "o", "#1f4e79"), ("rho_min", "least", "s", "#c55a11"))
    for key, label, marker, colour in looks:
        values = np.array([row[key] for row in rows], dtype=float)
        adequacy.plot(tasks, values, marker=marker, label=label, color=colour)
    adequacy.set_ylim(0, 1.05)
    adequacy.set_xlabel("task $t$")
    adequacy.set_ylabel(r"$\rho_t$, gradient energy left")
    adequacy.set_xticks(tasks[:: max(1, len(tasks) // 10)])
    adequacy.grid(alpha=0.3)
    adequacy.legend()
    beta = np.array([[row.get(f"beta_{tau}") for row in rows] for tau in range(len(rows))], dtype=float)
    image = interference.imshow(beta, cmap="cividis", vmin=0, vmax=1)
    interference.set_xlabel("while learning task $t$")
    interference.set_ylabel(r"old task $\tau$")
    name_tasks(interference, len(rows), inches=3.2)
    figure.colorbar(image, ax=interference, label=r"$\beta_{\tau \to t}$, old gradient left")
    return figure
