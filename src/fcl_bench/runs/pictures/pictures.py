"""A run's pictures, from numbers alone: whoever draws them needs Matplotlib, and not torch."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pictures:
    """What a run's pictures show.

    Attributes:
        title: of each picture.
        accuracy: [A_1..A_T] in percent; None where a task has no test sample.
        matrix: a[t, tau] (T, T) in percent, NaN above the diagonal.
        classes_seen: C_t per task.
        drift: (T, T) likewise, of features, or None where it was not measured.
        theory: what `ProjectionAudit` reported per task, or None.
    """

    title: str
    accuracy: list[float | None]
    matrix: np.ndarray
    classes_seen: list[int]
    drift: np.ndarray | None = None
    theory: list[dict[str, float | None]] | None = None


def drawn(pictures: Pictures) -> dict[str, bytes]:
    """File name -> PNG: accuracy.png, and where measured drift.png (FedRAN Fig. 2), theory.png (FedProTIP Fig. 2)."""
    # Here, since a run that was complete before draws nothing, and Matplotlib takes 0.4 s to import.
    from fcl_bench.runs.pictures.accuracy import accuracy_figure
    from fcl_bench.runs.pictures.drift import drift_figure
    from fcl_bench.runs.pictures.theory import theory_figure

    title, matrix = pictures.title, pictures.matrix
    figures = {"accuracy.png": accuracy_figure(title, pictures.accuracy, matrix, pictures.classes_seen)}
    if pictures.drift is not None:
        figures["drift.png"] = drift_figure(title, pictures.drift, matrix)
    if pictures.theory is not None:
        figures["theory.png"] = theory_figure(title, pictures.theory)
    files = {}
    for name, figure in figures.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
        files[name] = buffer.getvalue()
    return files
