"""The figure of a single run: accuracy after each task, and the accuracy matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from fcl_bench.config import text
from fcl_bench.results.figures.canvas import Drawing, canvas, percent_axes, title
from fcl_bench.results.figures.style import line_look, looks
from fcl_bench.results.figures.tasks import matrix_panel

#: The keys of a run that a caption states, where the run has them.
_SHOWN = ("method", "data", "backbone", "split", "partition", "beta", "clients", "seed", "adapt", "faults", "run_id")


def one_run(record: Mapping[str, Any], matrix: np.ndarray) -> Drawing:
    """Draw two panels: A_t on all classes seen so far, and a[t, tau] in percent.

    Args:
        record: the run's run.json.
        matrix: (T, T) in percent, NaN above the diagonal.
    """
    shown = [f"{key} {text(record[key])}" for key in _SHOWN if record.get(key) not in (None, "none")]
    figure, (left, right) = canvas(2, 2, [f"{', '.join(shown)}."], height=3.6)
    curve = [np.nan if value is None else value for value in record["metrics"]["accuracy"]]
    method = record["method"]
    left.plot(np.arange(1, len(curve) + 1), curve, **line_look(looks([method])[method], 0))
    title(left, "all classes seen so far", 2)
    left.set_xlabel("after task")
    left.set_ylabel("accuracy, $A_t$ (%)")
    percent_axes([left])
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    known = matrix[~np.isnan(matrix)]
    image = matrix_panel(right, matrix, *((float(known.min()), float(known.max())) if len(known) else (0.0, 100.0)))
    title(right, "each task's test samples", 2)
    figure.colorbar(image, ax=right, label="accuracy (%)", pad=0.02)
    return figure
