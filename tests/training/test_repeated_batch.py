"""Steps on one and the same batch by its Gram matrix: they are those of plain SGD, and taken only where they hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.data.images.batches import Samples
from fcl_bench.errors import UserError
from fcl_bench.training import linear_heads
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Heads, Network, feature_start
from fcl_bench.training.objective import Objective
from fcl_bench.training.trainer import Trainer, rows
from tests.methods.training_harness import CPU

N, D, SIZES = 9, 5, [3, 2]


def training(**knobs) -> Training:
    return Training(**{"epochs": 4, "batch_size": 16, "weight_decay": 0.01, **knobs})


def made(n: int = N) -> tuple[Network, Samples]:
    """Two heads, and a client's samples."""
    rng = np.random.default_rng(0)
    network = Network(feature_start(D))
    network.grow(SIZES, 0)
    inputs = torch.from_numpy(rng.normal(size=(n, D)).astype(np.float32))
    return network, Samples(inputs, torch.from_numpy(rng.integers(0, sum(SIZES), n)))


def trained(knobs: Training, monkeypatch, samples=None, objective=None, frozen=(), rate=0.3) -> tuple[dict, int]:
    """The weights after a client's round, and how often they came by the Gram matrix."""
    network, own = made()
    network.freeze(frozen)
    calls = []
    whole = linear_heads.train_repeatedly
    with monkeypatch.context() as patch:
        patch.setattr(linear_heads, "train_repeatedly", lambda *given: calls.append(1) or whole(*given))
        Trainer(knobs, rows, CPU).train(network, samples or own, rate, 0, objective or Objective())
    return {name: value.clone() for name, value in network.state().items()}, len(calls)


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("over", ["seen", "task"])
@pytest.mark.parametrize("n", [1, N])
def test_they_are_the_steps_of_plain_sgd(decay, over, n, monkeypatch):
    """Written out in float64: the gradient of the mean cross-entropy of those that compete, and weight decay."""
    _, samples = made(n)
    if over == "task":
        samples.labels = samples.labels % 2 + 3
    heads = Heads(((0, 1, 2), (3, 4)), (3, 4))
    found, calls = trained(training(weight_decay=decay), monkeypatch, samples, Objective(heads, over))
    assert calls == 1
    start, _ = made()
    W, b = (
        np.concatenate([start.state()[f"heads.{head}.{kind}"].double().numpy() for head in (0, 1)])
        for kind in ("weight", "bias")
    )
    Z, y = samples.inputs.double().numpy(), samples.labels.numpy()
    rivals = slice(3, 5) if over == "task" else slice(0, 5)
    for _ in range(4):
        scores = np.exp((Z @ W.T + b)[:, rivals])
        G = np.zeros((n, 5))
        G[:, rivals] = scores / scores.sum(axis=1, keepdims=True)
        G[np.arange(n), y] -= 1
        W, b = W - 0.3 * (G.T @ Z / n + decay * W), b - 0.3 * (G.sum(axis=0) / n + decay * b)
    for kind, wanted in (("weight", W), ("bias", b)):
        ours = np.concatenate([found[f"heads.{head}.{kind}"].numpy() for head in (0, 1)])
        np.testing.assert_allclose(ours, wanted, atol=1e-6)


def test_a_rate_of_the_heads_own_is_taken(monkeypatch):
    knobs = training(rates={"heads": 0.05}, lr=0.1)
    found, calls = trained(knobs, monkeypatch, rate=0.1)
    expected, _ = trained(training(), monkeypatch, rate=0.05)
    assert calls == 1
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


class Turned(Objective):
    def modify_gradients(self, network):
        for parameter in network.parameters():
            parameter.grad *= 2


class Tempered(Objective):
    def score_loss(self, scores, labels, inputs):
        return super().score_loss(scores / 2, labels, inputs)


class Halved(Samples):
    def batches(self, size, augment, generator):
        return ((inputs / 2, labels) for inputs, labels in super().batches(size, augment, generator))


def halved() -> Samples:
    _, samples = made()
    return Halved(samples.inputs, samples.labels)


@pytest.mark.parametrize(
    ("knobs", "rest"),
    [
        ({"batch_size": N - 1}, {}),
        ({"epochs": 1}, {}),
        ({"momentum": 0.9}, {}),
        ({"optimizer": "adam"}, {}),
        ({"rates": {"heads.0": 0.05}}, {}),
        ({}, {"frozen": ("heads.0.weight", "heads.0.bias")}),
        ({}, {"objective": Turned()}),
        ({}, {"objective": Tempered()}),
        ({}, {"objective": Objective(Heads(((0, 1, 2), (3, 4)), (0, 3, 4)), "seen", rest=True)}),
        ({}, {"samples": halved()}),
    ],
)
def test_everything_else_goes_step_by_step(knobs, rest, monkeypatch):
    _, calls = trained(training(**knobs), monkeypatch, **rest)
    assert calls == 0


def test_a_diverging_training_is_the_users_to_mend(monkeypatch):
    with pytest.raises(UserError, match="diverged"):
        trained(training(epochs=60), monkeypatch, rate=1e30)
