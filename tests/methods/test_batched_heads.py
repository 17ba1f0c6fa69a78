"""Heads that train side by side are those that train alone, to rounding, whatever the other clients have."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import pytest
import torch

from fcl_bench.data.images.batches import Samples
from fcl_bench.methods.averaging.fedprox import Proximal
from fcl_bench.methods.gradient.batched_heads import ProximalTerm, Steps, Turn, train_heads
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Heads as GrowingHeads
from fcl_bench.training.network import Network, feature_start
from fcl_bench.training.objective import Objective
from fcl_bench.training.trainer import Trainer, rows

D, SIZES = 6, (3, 2)
#: None, one, less than a batch, a batch, one that is left over, several batches, and the same number twice.
SAMPLES = (0, 1, 5, 8, 9, 40, 17, 5)
#: Of float32 after some tens of steps on numbers of size 1.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
SETTINGS = {
    "plain": {},
    "one epoch": {"epochs": 1},
    "decay": {"weight_decay": 0.05},
    "momentum": {"momentum": 0.9},
    "momentum, decay": {"momentum": 0.5, "weight_decay": 0.05, "epochs": 1},
}


def knobs_of(**own) -> Training:
    return Training(**{"epochs": 3, "batch_size": 8, "lr": 0.2, "weight_decay": 0.0, **own})


def clients(samples=SAMPLES, seed: int = 0) -> list[Turn]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for client, n in enumerate(samples):
        X = torch.randn(n, D, generator=generator)
        made.append(Turn(X, torch.randint(sum(SIZES), (n,), generator=generator), 100 + client))
    return made


def network() -> Network:
    made = Network(feature_start(D))
    made.grow(list(SIZES), 3)
    made.freeze(())
    return made


def alone(turn: Turn, knobs: Training, objective=Objective, frozen=()) -> tuple[torch.Tensor, torch.Tensor]:
    """What the client learns by itself."""
    own = network()
    own.freeze(frozen)
    Trainer(knobs, rows, torch.device("cpu")).train(
        own, Samples(turn.inputs, turn.labels), knobs.lr, turn.seed, objective()
    )
    return own.classifier()


class Heads(NamedTuple):
    """The weights (m, L, d) and biases (m, L) of m clients."""

    weight: torch.Tensor
    bias: torch.Tensor


def joined(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.cat([weight, bias.unsqueeze(1)], dim=1)


def together(turns: list[Turn], knobs: Training, **steps) -> Heads:
    start = joined(*network().classifier())
    found = train_heads(start, turns, Steps(steps.pop("objective", Objective()), knobs, knobs.lr, **steps))
    return Heads(found[..., :-1], found[..., -1])


@pytest.mark.parametrize("setting", SETTINGS)
def test_clients_of_any_size_learn_what_they_learn_alone(setting):
    knobs, turns = knobs_of(**SETTINGS[setting]), clients()
    found = together(turns, knobs)
    start = network().classifier()
    for client, turn in enumerate(turns):
        for ours, theirs, before in zip((found.weight, found.bias), alone(turn, knobs), start, strict=True):
            torch.testing.assert_close(ours[client], theirs, **CLOSE)
            # A step moves the weights by far more than the tolerance.
            assert torch.equal(ours[client], before) if not len(turn.labels) else (ours[client] - before).norm() > 0.01


@pytest.mark.parametrize("n", [1, 5, 40])
def test_a_single_client_is_a_group_too(n):
    knobs, [turn] = knobs_of(), clients([n])
    weight, bias = alone(turn, knobs)
    found = together([turn], knobs)
    torch.testing.assert_close(found.weight, weight.unsqueeze(0), **CLOSE)
    torch.testing.assert_close(found.bias, bias.unsqueeze(0), **CLOSE)


def test_clients_without_samples_keep_the_heads():
    found = together(clients([0, 0]), knobs_of())
    weight, bias = network().classifier()
    assert torch.equal(found.weight, weight.expand(2, -1, -1))
    assert torch.equal(found.bias, bias.expand(2, -1))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_neighbours_and_their_order_change_nothing_but_rounding(momentum):
    knobs, turns = knobs_of(momentum=momentum), clients()
    forwards, backwards = together(turns, knobs), together(turns[::-1], knobs)
    torch.testing.assert_close(forwards.weight, backwards.weight.flip(0), **CLOSE)
    some = together([turns[5], turns[2]], knobs)
    torch.testing.assert_close(some.weight, forwards.weight[[5, 2]], **CLOSE)


@pytest.mark.parametrize(("momentum", "max_norm"), [*itertools.product([0.0, 0.9], [None, 10.0, 0.05])])
def test_a_pull_of_each_clients_own(momentum, max_norm):
    knobs, start = knobs_of(momentum=momentum, weight_decay=0.01), network().state()
    turns, objectives = [], []
    for client, turn in enumerate(clients()):
        centre = {name: value + 0.1 * client for name, value in start.items()}
        columns = [torch.cat([centre[f"heads.{head}.{kind}"] for head in (0, 1)]) for kind in ("weight", "bias")]
        strength = 0.1 * (client + 1)
        turns.append(Turn(turn.inputs, turn.labels, turn.seed, ProximalTerm(joined(*columns), strength, max_norm)))
        objectives.append(Proximal(None, "seen", False, centre, strength, max_norm))
    found = together(turns, knobs)
    for client, turn in enumerate(turns):
        weight, bias = alone(turn, knobs, lambda own=objectives[client]: own)
        torch.testing.assert_close(found.weight[client], weight, **CLOSE)
        torch.testing.assert_close(found.bias[client], bias, **CLOSE)
    if max_norm == 0.05:
        unclipped = together(
            [dataclasses.replace(t, proximal=dataclasses.replace(t.proximal, max_norm=None)) for t in turns], knobs
        )
        assert (unclipped.weight - found.weight).abs().max() > 0.01


def test_objectives_say_what_they_pull_to():
    centre = {"heads.0.bias": torch.zeros(3)}
    assert Objective().proximal_term() is None
    assert Proximal(None, "seen", False, centre, 0.5).proximal_term() == (centre, 0.5, None)
    assert Proximal(None, "seen", False, centre, 0.5, 3.0).proximal_term() == (centre, 0.5, 3.0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_logits_that_are_frozen_neither_step_nor_decay(momentum):
    knobs, turns = knobs_of(weight_decay=0.1, momentum=momentum), clients()
    frozen = torch.tensor([True, True, True, False, False])
    found = together(turns, knobs, frozen_rows=frozen)
    weight, bias = network().classifier()
    assert torch.equal(found.weight[:, :3], weight[:3].expand(len(turns), -1, -1))
    assert torch.equal(found.bias[:, :3], bias[:3].expand(len(turns), -1))
    for client, turn in enumerate(turns):
        theirs, _ = alone(turn, knobs, frozen={"heads.0.weight", "heads.0.bias"})
        torch.testing.assert_close(found.weight[client], theirs, **CLOSE)


def test_logits_that_do_not_compete_have_no_gradient():
    heads = GrowingHeads(((0, 1, 2), (3, 4)), (3, 4))
    knobs = knobs_of()
    turns = [Turn(turn.inputs, 3 + turn.labels % 2, turn.seed) for turn in clients()]
    found = together(turns, knobs, objective=Objective(heads, "task"))
    for client, turn in enumerate(turns):
        weight, _ = alone(turn, knobs, lambda: Objective(heads, "task"))
        torch.testing.assert_close(found.weight[client], weight, **CLOSE)
    assert torch.equal(found.weight[:, :3], network().classifier()[0][:3].expand(len(turns), -1, -1))
