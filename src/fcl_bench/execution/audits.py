"""Which audits a run has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fcl_bench.execution.drift import FeatureDrift
from fcl_bench.protocol.audit import Audit
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.method import Method


def audits_of(
    method: Method, context: Context, drift_samples: int, shards: Sequence[Sequence[np.ndarray]]
) -> dict[str, Audit]:
    """The audits of a run by name: the method's own (`Method.audits`), and "drift" (drift.csv).

    Args:
        method, context: the run's method and problem.
        drift_samples: reference samples per client and task for the feature drift; 0: it is not measured.
        shards: [task][client] -> indices of training samples.
    """
    drift = {"drift": FeatureDrift(drift_samples, context.seed, shards)} if drift_samples else {}
    return {**method.audits(context), **drift}


def drift_of(audits: Mapping[str, Audit]) -> FeatureDrift | None:
    """The feature drift from a run's audits; None: it was not measured."""
    found = audits.get("drift")
    return found if isinstance(found, FeatureDrift) else None
