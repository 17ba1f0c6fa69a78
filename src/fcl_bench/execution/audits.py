"""Which audits a run has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fcl_bench.execution.drift import FeatureDrift
from fcl_bench.methods.closed_form.bounds import CentredSketchAudit, FedRANAudit, GaussianRemainderAudit
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.methods.projection.projected import ProjectedMethod
from fcl_bench.methods.projection.theory import ProjectionAudit
from fcl_bench.protocol.audit import Audit
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.method import Method


def audits_of(
    method: Method, context: Context, drift_samples: int, shards: Sequence[Sequence[np.ndarray]]
) -> dict[str, Audit]:
    """The audits of a run by name: "bounds" (bounds.csv) if the method's knobs ask for it, and "drift" (drift.csv).

    Args:
        method, context: the run's method and problem.
        drift_samples: reference samples per client and task for the feature drift; 0: it is not measured.
        shards: [task][client] -> indices of training samples.
    """
    own = against_theory(method, context)
    found: dict[str, Audit] = {} if own is None else {"bounds": own}
    return found | ({"drift": FeatureDrift(drift_samples, context.seed, shards)} if drift_samples else {})


def against_theory(method: Method, context: Context) -> Audit | None:
    """The audit against the exact solution or the assumptions of the method's paper; None: the knobs ask for none."""
    if isinstance(method, FedRAN) and method.bounds:
        return FedRANAudit(method, context)
    if isinstance(method, CentredSketch) and method.bounds:
        return (CentredSketchAudit if method.remainder == "isotropic" else GaussianRemainderAudit)(method, context)
    if isinstance(method, ProjectedMethod) and method.theory:
        return ProjectionAudit(method, context)
    return None


def drift_of(audits: Mapping[str, Audit]) -> FeatureDrift | None:
    """The feature drift from a run's audits; None: it was not measured."""
    found = audits.get("drift")
    return found if isinstance(found, FeatureDrift) else None
