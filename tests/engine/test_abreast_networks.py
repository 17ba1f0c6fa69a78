"""Runs with `parallel_clients` whose clients train small convolutional networks.

Networks without ReLUs are compared in float32: a ReLU whose input lies within rounding of 0 may let a gradient through
on one side alone (with ReLUs, and in float64: tests/training/test_networks_side_by_side.py).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.averaging.feddyn import FedDyn
from fcl_bench.methods.averaging.fedewc import FedEWC
from fcl_bench.methods.averaging.fedprox import FedProx
from fcl_bench.methods.averaging.scaffold import Scaffold
from fcl_bench.methods.distillation.moon import MOON
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.protocol.context import Context
from fcl_bench.training.knobs import Training
from tests.engine.test_abreast import CLOSE, SIZES, beside
from tests.methods.training_harness import federation_of, image_tasks, tiny_context
from tests.methods.whole_runs import assert_resumes, learnt, model_of, same
from tests.small_runs import run_in

ALONE_AUTO = "a network as wide as this trains faster alone"


def knobs_of(**own) -> Training:
    return Training(**{"rounds": 3, "epochs": 2, "batch_size": 8, "lr": 0.05, "augment": "crop_flip", **own})


def tasks_of():
    return image_tasks(np.random.default_rng(0), [4, 3], SIZES)


def smooth_context(width: int = 4) -> Context:
    """Of a network whose ReLUs are gone."""
    context = tiny_context(width=width)
    assert context.network is not None
    build = context.network.build

    def without() -> nn.Module:
        body = build()
        for stage in body.children():
            if isinstance(stage, nn.Sequential):
                stage[2] = nn.Identity()
        return body

    return dataclasses.replace(context, network=dataclasses.replace(context.network, build=without))


def ended(method: GradientMethod, size: str = "1", width: int = 4):
    return learnt(method, smooth_context(width), tasks_of(), transport=beside(size))


@pytest.mark.parametrize(
    "method",
    [
        FedAvg(training=knobs_of(momentum=0.9, weight_decay=0.01)),
        FedAvg(training=knobs_of(), frozen_stages=2, frozen_heads=True, loss_over="task"),
        FedProx(training=knobs_of(), mu=0.1),
        FedDyn(training=knobs_of(momentum=0.5)),
    ],
    ids=["momentum", "frozen", "fedprox", "feddyn"],
)
def test_clients_of_unequal_sizes_learn_the_same(method):
    single, several = ended(method), ended(method, "3")
    ours, theirs = model_of(several), model_of(single)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], **CLOSE)
    found = several.state.side_by_side
    # Groups of 3 and 2 in the first task, and of 3 and 1 in the second, in which one client has no samples.
    assert found["turns_together"] == 3 * (5 + 3)
    assert found["alone_since"] == []
    up = [[row.up_bytes for row in run.state.ledger.uploads] for run in (single, several)]
    assert up[0] == up[1]


@pytest.mark.parametrize(
    ("method", "together", "reason"),
    [
        (Scaffold(training=knobs_of(rounds=2, epochs=1)), 0, "clients of method=scaffold do more than train"),
        (MOON(training=knobs_of(rounds=2, epochs=1)), 5, "the loss looks at more than the network's logits"),
        (FedEWC(training=knobs_of(rounds=2, epochs=1)), 10, "the method changes gradients in a way of its own"),
        (
            FedAvg(training=knobs_of(rounds=2, epochs=1, optimizer="adam")),
            0,
            "the step of method.training is not SGD with one rate",
        ),
    ],
    ids=["scaffold", "moon", "fedewc", "adam"],
)
def test_methods_that_do_more_say_why_they_train_alone(method, together, reason):
    several = ended(method, "3")
    assert several.state.side_by_side["alone_since"] == [reason]
    assert several.state.side_by_side["turns_together"] == together
    if not together:
        assert same(model_of(several), model_of(ended(method)))


def test_a_stage_without_training_is_no_reason():
    several = ended(FedAvg(training=knobs_of(rounds=1), replay_head="gaussian"), "3")
    assert several.state.side_by_side["turns_together"] == 5 + 3
    assert several.state.side_by_side["alone_since"] == []


def test_auto_leaves_wide_networks_alone():
    method = FedAvg(training=knobs_of(rounds=1, epochs=1))
    narrow, wide = ended(method, "auto", 16), ended(method, "auto", 17)
    assert narrow.state.side_by_side == {"turns_together": 9, "turns_alone": 0, "alone_since": []}
    assert wide.state.side_by_side == {"turns_together": 0, "turns_alone": 9, "alone_since": [ALONE_AUTO]}
    assert same(model_of(wide), model_of(ended(method, "1", 17)))
    assert ended(method, "5", 17).state.side_by_side["turns_together"] == 9  # a number is a number


def test_a_run_resumes_from_every_round_bit_for_bit():
    method = FedDyn(training=knobs_of(rounds=2, momentum=0.5))
    whole, _ = assert_resumes(lambda: federation_of(method, tiny_context(), tasks_of(), transport=beside("3")), step=2)
    assert whole.state.side_by_side["turns_together"] > 0


def test_a_model_that_is_not_finite_is_one_line():
    with pytest.raises(Exception, match=r"method\.training\.lr=1e\+20: training diverged"):
        ended(FedAvg(training=knobs_of(lr=1e20, weight_decay=1e3)), "4")


@pytest.mark.usefixtures("no_pictures")
def test_a_run_of_the_command_records_who_trained_together(tmp_path):
    overrides = (
        *("method=fedavg", "backbone=tiny", "backbone.width=8", "tasks=2", "clients=3", "partition=iid"),
        *("method.training.rounds=1", "method.training.epochs=1"),
    )
    single, several = (run_in(tmp_path / size, *overrides, f"parallel_clients={size}") for size in ("1", "auto"))
    assert single.record["side_by_side"] == {"turns_together": 0, "turns_alone": 6, "alone_since": []}
    assert several.record["side_by_side"] == {"turns_together": 6, "turns_alone": 0, "alone_since": []}
    assert single.record["run_id"] != several.record["run_id"]
    assert several.record["metrics"]["accuracy"] == pytest.approx(single.record["metrics"]["accuracy"], abs=1.0)
