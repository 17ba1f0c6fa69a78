"""A run goes on from every checkpoint to the same bits: the state that a method declares is all that it needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.projection.task_identity import HeadRank, Tip
from fcl_bench.protocol.method import Method
from fcl_bench.training.knobs import Gaussian
from tests.conformance.cases import EVERY, FAST, federation_for, method_of, tasks_for
from tests.methods.glfc_harness import quickly, short_descent  # noqa: F401  # a fixture
from tests.methods.whole_runs import assert_resumes, same
from tests.small_methods import NAMES, architecture, trains_by_gradient

#: Knobs with which a method has another state.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "afl recursive": ("afl", {"aggregation": "recursive", "ridge": 2.0}),
    "air logits": ("air", {"correction": "logits", "gamma": "gcv"}),
    "centralised, no restart": ("centralised", {"restart": False}),
    "centred_sketch of all numbers": ("centred_sketch", {"M": None}),
    "ds_al, ridge chosen": ("ds_al", {"gamma": "auto", "scale_scores": True}),
    "fedavg, heads by ccvr": ("fedavg", {"ccvr": "gaussian", "gaussian": Gaussian(samples=16, lr=0.1)}),
    "fedavg, much frozen": ("fedavg", {"frozen_stages": 1, "frozen_heads": True}),
    "feddyn reset": ("feddyn", {"reset": True}),
    "fedicarl nme": ("fedicarl", {"classify": "nme", "memory": 6}),
    "fedicarl published": (
        "fedicarl",
        {
            "variant": "published",
            "classify": "softmax",
            "memory": 5,
            "training": dataclasses.replace(FAST, weighting="uniform"),
        },
    ),
    "fedklda of two maps": ("fedklda", {"ensemble": 2}),
    "fedprotip routed": ("fedprotip", {"tip": Tip(route="sample")}),
    "fedprotip sequential": ("fedprotip", {"extension": "sequential", "head_rank": HeadRank(3, 6)}),
    "glfc entropy": ("glfc", {"signal": "entropy", "rise": 0.01}),
    "lga entropy": ("lga", {"signal": "entropy", "rise": 0.01, "proxy": "none"}),
    "lorm average": ("lorm", {"merge": "average"}),
    "moon projection": ("moon", {"representation": "projection", "width": 5}),
    "pilora published": ("pilora", {"variant": "published"}),
    "ranpac held out": ("ranpac", {"ridge": "held_out", "scope": "task"}),
    "scaffold reset": ("scaffold", {"reset": True}),
    "stsa, ridge chosen": ("stsa", {"gamma": "gcv"}),
    "stsa_e unbiased": ("stsa_e", {"estimator": "unbiased"}),
}


def on_features(name: str) -> Method | None:
    """The method on linear heads; None if it refuses them."""
    try:
        return dataclasses.replace(method_of(name), trains="features", frozen_stages=0)
    except UserError:
        return None


ON_FEATURES = [
    name for name in NAMES if trains_by_gradient(name) and architecture(name) == "conv" and on_features(name)
]


def made(name: str, variant: str) -> Method:
    method = method_of(name)
    if name in NAMES and trains_by_gradient(name) and name != "centralised":
        part = dataclasses.replace(method.training, fraction=0.7, batch_size=16)
        method = dataclasses.replace(method, training=part)
    if variant == "features":
        return dataclasses.replace(method, trains="features", frozen_stages=0)
    return dataclasses.replace(method, **VARIANTS[variant][1]) if variant else method


@pytest.mark.slow_cases(
    "centralised-",
    "centralised_softmax-",
    "coda_prompt-",
    "cprompt-",
    "dualprompt-",
    "fedavg-fedavg, heads by ccvr",
    "feddyn-feddyn reset",
    "fedewc-",
    "fedgen-",
    "fedicarl-",
    "fedicarl-fedicarl nme",
    "fedicarl-fedicarl published",
    "fedntd-",
    "fedprotip-",
    "fedprotip-fedprotip routed",
    "fedprotip-fedprotip sequential",
    "fedspace-",
    "fot-",
    "glfc-",
    "glfc-glfc entropy",
    "l2p-",
    "lander-",
    "lga-",
    "lga-lga entropy",
    "lorm-",
    "lorm-lorm average",
    "mfcl-",
    "moon-moon projection",
    "pilora-",
    "pilora-pilora published",
    "target-",
)
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *((name, "") for name in EVERY),
        *((name, variant) for variant, (name, _) in VARIANTS.items()),
        *((name, "features") for name in ON_FEATURES),
    ],
)
@quickly
def test_a_run_goes_on_from_every_round_bit_for_bit(name, variant):
    method = made(name, variant)
    whole, saved = assert_resumes(lambda: federation_for(method))
    assert len(saved) >= 2
    last = federation_for(method)
    last.restore(*saved[-1])
    inputs = torch.cat([samples for clients in tasks_for(method) for samples, _ in clients])
    assert torch.equal(last.server.predict(inputs), whole.server.predict(inputs))
    assert same(last.server.model(), whole.server.model())
