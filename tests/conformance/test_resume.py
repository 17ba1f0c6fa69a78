"""A run goes on from every checkpoint to the same bits: the state that a method declares is all that it needs."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest

from fcl_bench.errors import UserError
from fcl_bench.methods.exemplars import proxy
from fcl_bench.methods.gradient.ccvr import Gaussian
from fcl_bench.protocol.method import Method
from tests.conformance.cases import EVERY, federation_for, method_of
from tests.engine.hostile_cases import FAST
from tests.methods.whole_runs import assert_resumes
from tests.small_methods import NAMES, architecture, trains_by_gradient

#: Some clients have no turn in a round.
PART = dataclasses.replace(FAST, fraction=0.7, batch_size=16)
#: Knobs with which a method has another state.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "air logits": ("air", {"correction": "logits"}),
    "centred_sketch gaussian": ("centred_sketch", {"remainder": "gaussian", "input_rank": 2}),
    "fedavg, heads by ccvr": ("fedavg", {"ccvr": "gaussian", "gaussian": Gaussian(samples=16, lr=0.1)}),
    "fedcbc published": ("fedcbc", {"variant": "published", "scaling": "none"}),
    "fedfecam shared": ("fedfecam", {"covariance": "shared"}),
    "fedicarl nme": ("fedicarl", {"classify": "nme", "memory": 6}),
    "fedicarl published": (
        "fedicarl",
        {"variant": "published", "memory": 5, "training": dataclasses.replace(PART, weighting="uniform")},
    ),
    "fedlda offset": ("fedlda", {"M": 8, "centre": "all_tasks"}),
    "glfc entropy": ("glfc", {"signal": "entropy", "rise": 0.01}),
    "lander, generator sent": ("lander", {"send": "generator"}),
    "lga entropy": ("lga", {"signal": "entropy", "rise": 0.01}),
    "moon projection": ("moon", {"representation": "projection", "width": 5}),
    "pilora published": ("pilora", {"variant": "published"}),
    "ranpac folds": ("ranpac", {"ridge": "folds", "folds": 2}),
    "regmean ridge": ("regmean", {"trains": "features", "frozen_stages": 0, "local": "ridge"}),
    "target, generator sent": ("target", {"send": "generator"}),
}


def on_features(name: str) -> Method | None:
    """The method on linear heads; None if it refuses them."""
    try:
        return dataclasses.replace(method_of(name), trains="features", frozen_stages=0)
    except UserError:
        return None


def cases() -> dict[str, Method]:
    found = {name: method_of(name) for name in EVERY}
    found |= {
        name: dataclasses.replace(method, training=PART)
        for name, method in found.items()
        if name in NAMES and trains_by_gradient(name) and name != "centralised"
    }
    found |= {name: dataclasses.replace(found[of], **knobs) for name, (of, knobs) in VARIANTS.items()}
    heads = {name: on_features(name) for name in NAMES if trains_by_gradient(name) and architecture(name) == "conv"}
    return found | {f"{name} on features": method for name, method in heads.items() if method}


@pytest.mark.parametrize("method", [pytest.param(method, id=name) for name, method in cases().items()])
def test_a_run_goes_on_from_every_round_bit_for_bit(method, monkeypatch):
    # Images that are reconstructed hardly begin to be: how good they are is not asked.
    monkeypatch.setattr(proxy, "reconstruct", partial(proxy.reconstruct, inner=1))
    whole, saved = assert_resumes(lambda: federation_for(method))
    assert len(saved) >= 2
    assert whole.state.tasks_done == 2
