"""Small runs with a first stage, for tests."""

from __future__ import annotations

from pathlib import Path

from fcl_bench.execution.plan import Plan, make_plan
from tests.small_runs import settings_for

SMALL = (
    *("data=digits", "backbone=tiny", "backbone.width=4", "tasks=3", "clients=3", "adapt=fedavg"),
    *("adapt.training.rounds=3", "adapt.training.epochs=1", "adapt.training.augment=none", "adapt.training.lr=0.1"),
)
METHODS = {
    "stsa": ("method=stsa", "method.M=64", "method.gamma=1"),
    "stsa_e": ("method=stsa_e", "method.M=64", "method.gamma=1", "method.dummy_clients=4"),
    "fedran": ("method=fedran", "method.M=64", "method.rank=20"),
}
STSA = (*SMALL, *METHODS["stsa"])


def plan_of(out: Path, *overrides: str) -> Plan:
    return make_plan(settings_for(out, *overrides))
