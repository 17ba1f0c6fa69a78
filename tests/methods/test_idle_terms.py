"""A term that does next to nothing is a gate, for methods whose server knows of it; FedEWC's is in tests/engine."""

from __future__ import annotations

import pytest
import torch

from fcl_bench.methods.averaging.scaffold import Scaffold
from fcl_bench.methods.projection.fot import FOT
from fcl_bench.methods.projection.projected import basis_name
from tests.methods import glfc_harness, mfcl_harness
from tests.methods.fedprotip_harness import fedprotip_of, three_tasks, training
from tests.methods.glfc_harness import short_descent as short_descent
from tests.methods.training_harness import learn_images, tiny_context


@pytest.mark.parametrize("kind", ["fot", "fedprotip"])
def test_bases_that_hold_nothing_or_everything_are_told(kind):
    knobs = {"rounds": 1, "epochs": 1}
    method = fedprotip_of(knobs) if kind == "fedprotip" else FOT(training=training(**knobs), threshold=0.5, columns=8)
    told = []
    server = learn_images(
        method, tiny_context(), three_tasks()[:2], after=lambda _, server: told.append(server.gates())
    )
    assert told == [{}, {}]

    def with_bases(part: float) -> str:
        """Of the first task, whose bases matter in the second."""
        sides = server.widths().items()
        server.bases |= {basis_name(0, layer): torch.eye(side)[:, : round(part * side)] for layer, side in sides}
        return server.gates().get("idle_term", "")

    assert [with_bases(part) for part in (0.0, 0.5, 1.0)] == [
        "the bases of earlier tasks are empty: nothing is protected",
        "",
        "the bases of earlier tasks left no direction to learn in",
    ]


def test_variates_that_stay_zero_are_told():
    server = learn_images(
        Scaffold(training(rounds=2, epochs=1, weighting="uniform")), tiny_context(), three_tasks()[:1]
    )
    assert server.gates() == {}
    server.sums = {name: torch.zeros_like(total) for name, total in server.sums.items()}
    assert server.gates() == {"idle_term": "all variates are zero: this is fedavg"}


def test_synthetic_images_of_one_class_are_told():
    told = []
    method = mfcl_harness.mfcl()
    server = learn_images(method, tiny_context(), mfcl_harness.tasks()[:2], after=lambda _, s: told.append(s.gates()))
    assert told[0] == {}
    labels = server._shown["labels"]
    labels[0], labels[1] = 0, 1
    assert server.gates() == {}
    labels.fill_(2)
    assert server.gates() == {"idle_term": "the 16 synthetic images that were looked at are of one class"}


@pytest.mark.slow
@pytest.mark.usefixtures("short_descent")
def test_clients_that_never_notice_new_classes_are_told():
    told = []
    # No entropy rises by so much.
    silent, heard = ({"signal": "entropy", "rise": 100.0}, {})
    for knobs in (silent, heard):
        federation = glfc_harness.made(glfc_harness.glfc(**knobs))
        federation.run(lambda _, federation=federation: told.append(federation.server.gates()))
    tasks = len(told) // 2
    never = {"idle_term": "no client has noticed new classes since the first task"}
    assert told == [{}, *[never] * (tasks - 1), *[{}] * tasks]
