"""Which pictures a run leaves in its folder."""

from __future__ import annotations

from typing import Any

from fcl_bench.audits.drift import FeatureDrift
from fcl_bench.data.splits.stream import Stream
from fcl_bench.engine.federation import Federation
from fcl_bench.engine.metrics import accuracy_matrix
from fcl_bench.runs.pictures.pictures import Pictures
from fcl_bench.runs.record import test_sizes
from fcl_bench.runs.screen import headline


def run_pictures(record: dict[str, Any], stream: Stream, federation: Federation) -> Pictures:
    """Of accuracy always; of drift and of projection where they were measured."""
    drift = federation.audits.get("drift")
    return Pictures(
        title=headline(record),
        accuracy=record["metrics"]["accuracy"],
        matrix=accuracy_matrix(federation.state.answers["correct"], test_sizes(federation)),
        classes_seen=[task.columns_seen for task in stream.tasks],
        drift=drift.matrix(len(stream.tasks)) if isinstance(drift, FeatureDrift) and len(stream.tasks) > 1 else None,
        theory=record["bounds"] if record["bounds"] and "rho" in record["bounds"][0] else None,
    )
