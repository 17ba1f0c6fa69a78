"""Small networks that train side by side: those of clients that train alone, in float64 but for the last digits.

In float32 a ReLU whose input lies within rounding of 0 may let a gradient through on one side alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fcl_bench.methods.averaging.feddyn import Dynamic
from fcl_bench.training import grouped
from fcl_bench.training.batched_heads import Steps
from fcl_bench.training.heads import Heads
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Network
from fcl_bench.training.networks_side_by_side import Turn, train_networks
from fcl_bench.training.objective import Objective
from fcl_bench.training.samples import Samples
from fcl_bench.training.trainer import Trainer
from tests.methods.training_harness import CPU, tiny_context

#: Two heads; the classes of both are columns.
HEADS = Heads(((0, 1, 2), (3, 4)), (3, 4))
#: Several epochs of batches that are full, short, joined by a single sample; one batch; one sample; none.
SIZES = [13, 17, 1, 0, 5, 16, 2]


def network_of(size: int = 8) -> Network:
    start = tiny_context(size).network
    assert start is not None
    network = Network(start)
    network.grow(HEADS.sizes, 0)
    with torch.no_grad():  # running statistics that differ from those of a batch norm that was never used
        for name, value in network.state().items():
            if "running" in name:
                value.add_(torch.rand(value.shape, generator=torch.Generator().manual_seed(1)))
    return network.double().to(memory_format=torch.channels_last)


def scaled(images: torch.Tensor) -> torch.Tensor:
    return images.to(torch.float64, memory_format=torch.channels_last) / 127.5 - 1


def clients(sizes=SIZES, size: int = 8) -> list[Samples]:
    draws = torch.Generator().manual_seed(2)
    images = [torch.randint(256, (n, 3, size, size), generator=draws, dtype=torch.uint8) for n in sizes]
    return [Samples(own, torch.randint(3, 5, (len(own),), generator=draws)) for own in images]


def assert_the_same(network: Network, knobs: Training, objectives: list[Objective], samples: list[Samples]):
    trainer, start = Trainer(knobs, scaled, CPU), {name: value.clone() for name, value in network.state().items()}
    alone = []
    for k, (own, objective) in enumerate(zip(samples, objectives, strict=True)):
        network.load(start)
        network.train(True)
        trained = trainer.train(network, own, knobs.lr, k, objective)
        alone.append({name: value.clone() for name, value in trained.items()})
    network.load(start)
    turns = [Turn(own, k, objective.pull()) for k, (own, objective) in enumerate(zip(samples, objectives, strict=True))]
    found = train_networks(network, turns, Steps(objectives[0], knobs, knobs.lr), trainer)
    for name, value in network.state().items():
        torch.testing.assert_close(value, start[name], rtol=0, atol=0)
    for ours, theirs in zip(found, alone, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-12)
    return alone, start


def knobs_of(**own) -> Training:
    return Training(**{"rounds": 1, "epochs": 3, "batch_size": 4, "lr": 0.05, "weight_decay": 0.01, **own})


@pytest.mark.parametrize("augment", ["none", "crop_flip_brightness"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_clients_of_all_sizes_learn_what_they_learn_alone(momentum, augment):
    objectives = [Objective(HEADS, "seen") for _ in SIZES]
    alone, start = assert_the_same(network_of(), knobs_of(momentum=momentum, augment=augment), objectives, clients())
    moved = [bool((own["body.stage1.0.weight"] != start["body.stage1.0.weight"]).any()) for own in alone]
    assert moved == [n > 0 for n in SIZES]
    # A single sample has no statistics of its own.
    statistics = [bool((own["body.stage1.1.running_var"] != start["body.stage1.1.running_var"]).any()) for own in alone]
    assert statistics == [n > 1 for n in SIZES]


def test_batches_of_one_size_take_the_usual_batch_norm(monkeypatch):
    shares = []
    inner = grouped._normalised

    def seen(x, layer, own, share):
        shares.append(share)
        return inner(x, layer, own, share)

    monkeypatch.setattr(grouped, "_normalised", seen)
    assert_the_same(network_of(), knobs_of(), [Objective(HEADS) for _ in range(3)], clients([8, 4, 8]))
    assert shares
    assert all(share is None for share in shares)


def test_images_of_16_pixels_are_halved_three_times():
    assert_the_same(network_of(16), knobs_of(epochs=1), [Objective(HEADS) for _ in range(2)], clients([5, 7], 16))


@pytest.mark.parametrize("max_norm", [None, 0.3])
def test_each_client_is_pulled_to_its_own_centre_and_clipped(max_norm):
    network = network_of()
    draws = torch.Generator().manual_seed(3)
    objectives: list[Objective] = []
    for k in range(len(SIZES)):
        centre = {
            name: value.detach() + 0.1 * torch.rand(value.shape, generator=draws, dtype=value.dtype)
            for name, value in network.training_parameters().items()
        }
        objectives.append(Dynamic(HEADS, "seen", False, centre, 0.1 * (k + 1), max_norm))
    assert_the_same(network, knobs_of(momentum=0.5), objectives, clients())


def test_frozen_stages_and_heads_and_rows_at_rest_stay():
    network = network_of()
    back = Heads(HEADS.columns, (1, 3, 4))  # class 1 comes back, in whose head the others rest
    frozen = {name for name in network.state() if name.startswith("body.stage1.")}
    network.freeze(frozen)
    objectives = [Objective(back, "task", rest=True) for _ in SIZES]
    alone, start = assert_the_same(network, knobs_of(), objectives, clients())
    assert not frozen & alone[0].keys()
    torch.testing.assert_close(alone[0]["heads.0.weight"][[0, 2]], start["heads.0.weight"][[0, 2]], rtol=0, atol=0)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(16, 16, 3, padding=1, groups=2),
        nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular"),
        nn.BatchNorm2d(16, affine=False),
        nn.GroupNorm(2, 16),
        nn.Linear(8, 8),
        nn.Dropout(),
    ],
)
def test_layers_without_a_grouped_form_are_named(layer):
    network = network_of()
    assert grouped.unsuited(network) == ""
    network.put_body(nn.Sequential(network.body, layer))
    assert grouped.unsuited(network) == f"{type(layer).__name__} has no form for several clients at once"


@pytest.mark.parametrize(("size", "narrow"), [(32, True), (33, False)])
def test_what_pays_follows_channels_times_pixels(size, narrow):
    assert grouped.pays(network_of(), size) is narrow  # of 4 channels
