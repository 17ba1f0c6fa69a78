"""The pictures that a run leaves in its folder."""

from __future__ import annotations

import io

from fcl_bench.engine.federation import Federation
from fcl_bench.engine.metrics import accuracy_matrix
from fcl_bench.runs.record import test_sizes
from fcl_bench.runs.run_json import Result
from fcl_bench.runs.screen import headline


def drawn(record: Result, federation: Federation) -> dict[str, bytes]:
    """File name -> PNG: accuracy.png, and where measured drift.png (FedRAN Fig. 2), theory.png (FedProTIP Fig. 2)."""
    # Here, since a run that was complete before draws nothing, and Matplotlib takes 0.4 s to import.
    from fcl_bench.runs.pictures.accuracy import accuracy_figure
    from fcl_bench.runs.pictures.audits import drift_figure, theory_figure

    title, tasks, bounds = headline(record), federation.stream.tasks, record["bounds"]
    matrix = accuracy_matrix(federation.state.answers["correct"], test_sizes(federation))
    seen = [task.columns_seen for task in tasks]
    figures = {"accuracy.png": accuracy_figure(title, record["metrics"]["accuracy"], matrix, seen)}
    if federation.drift is not None and len(tasks) > 1:
        figures["drift.png"] = drift_figure(title, federation.drift.matrix(len(tasks)), matrix)
    if bounds and "rho" in bounds[0]:
        figures["theory.png"] = theory_figure(title, bounds)
    files = {}
    for name, figure in figures.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
        files[name] = buffer.getvalue()
    return files
