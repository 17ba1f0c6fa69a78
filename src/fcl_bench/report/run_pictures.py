"""Which pictures a run leaves in its folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fcl_bench.data.stream import Stream
from fcl_bench.evaluation.metrics import accuracy_matrix
from fcl_bench.federation.engine import Federation
from fcl_bench.garbage import resting_collector
from fcl_bench.report.record import test_sizes
from fcl_bench.report.screen import headline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run_figures(record: dict[str, Any], stream: Stream, federation: Federation) -> dict[str, Figure]:
    """accuracy.png; where it was measured, drift.png (FedRAN Fig. 2) and theory.png (FedProTIP Fig. 2)."""
    # Here, since a run that was complete before draws nothing, and Matplotlib takes 0.4 s to import.
    with resting_collector():
        from fcl_bench.report.drift_figure import drift_figure
        from fcl_bench.report.figures import accuracy_figure
        from fcl_bench.report.theory_figure import theory_figure

    matrix = accuracy_matrix(federation.state.answers["correct"], test_sizes(federation))
    seen = [task.columns_seen for task in stream.tasks]
    title = headline(record)
    figures = {"accuracy.png": accuracy_figure(title, record["metrics"]["accuracy"], matrix, seen)}
    if federation.drift is not None and len(stream.tasks) > 1:
        figures["drift.png"] = drift_figure(title, federation.drift.matrix(len(stream.tasks)), matrix)
    if record["bounds"] and "rho" in record["bounds"][0]:
        figures["theory.png"] = theory_figure(title, record["bounds"])
    return figures
