"""What projection leaves of gradients (FedProTIP Fig. 2 a, b)."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from fcl_bench.runs.pictures.ticks import task_ticks


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
    for key, label, marker in (("rho", "mean over rounds", "o"), ("rho_min", "least", "s")):
        values = [np.nan if row[key] is None else row[key] for row in rows]
        adequacy.plot(tasks, values, marker=marker, label=label, color="#1f4e79" if marker == "o" else "#c55a11")
    adequacy.set_ylim(0, 1.05)
    adequacy.set_xlabel("task $t$")
    adequacy.set_ylabel(r"$\rho_t$, gradient energy left")
    adequacy.set_xticks(tasks[:: max(1, len(tasks) // 10)])
    adequacy.grid(alpha=0.3)
    adequacy.legend()
    beta = np.full((len(rows), len(rows)), np.nan)
    for t, row in enumerate(rows):
        for tau in range(t):
            value = row.get(f"beta_{tau}")
            beta[tau, t] = np.nan if value is None else value
    image = interference.imshow(beta, cmap="cividis", vmin=0, vmax=1)
    interference.set_xlabel("while learning task $t$")
    interference.set_ylabel(r"old task $\tau$")
    ticks = task_ticks([str(t) for t in tasks], inches=3.2)
    interference.set_xticks(ticks - 1, ticks)
    interference.set_yticks(ticks - 1, ticks)
    figure.colorbar(image, ax=interference, label=r"$\beta_{\tau \to t}$, old gradient left")
    return figure
