"""Gradients of linear heads in closed form: they are autograd's, for every method, and used only where they hold."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from fcl_bench.data.images.batches import Samples
from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import GradientClient
from fcl_bench.training.knobs import Training
from fcl_bench.training.linear_heads import LinearHeads
from fcl_bench.training.network import Heads, Network, feature_start
from fcl_bench.training.objective import Objective
from fcl_bench.training.trainer import Trainer, rows
from tests.methods.training_harness import CPU, feature_tasks, federation_of
from tests.methods.whole_runs import feature_context
from tests.small_methods import NAMES, architecture, class_of, trains_by_gradient

D = 6
METHODS = [name for name in NAMES if trains_by_gradient(name) and architecture(name) == "conv"]
SETTINGS = {
    "plain": {},
    "momentum, decay": {"momentum": 0.9, "weight_decay": 0.01},
    "rates": {"rates": {"heads.0": 0.3, "heads.1.bias": 0.02}, "weight_decay": 0.01},
    "adam": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.01},
}
COMPETITION = [("seen", False), ("task", False), ("seen", True)]


def training(**knobs) -> Training:
    return Training(**{"rounds": 2, "epochs": 2, "batch_size": 8, "lr": 0.1, "weight_decay": 0.0, **knobs})


def overlapping_tasks():
    """Three tasks: the second has two classes of the first besides two new ones, the third two new ones alone."""
    first, second, third = feature_tasks(0, [4, 4, 2], [[20, 13], [17, 0], [9, 12]], D)
    moved = [(Z, labels - 2) for Z, labels in second]
    return [first, moved, [(Z, labels - 2) for Z, labels in third]]


def on_features(name: str, knobs: Training, **own) -> GradientMethod:
    """The method with its own defaults, on features; no stage of a body can be frozen there."""
    return class_of(name)(training=knobs, trains="features", frozen_stages=0, **own)


def learnt(method: GradientMethod, monkeypatch, fast: bool) -> tuple[dict[str, torch.Tensor], list, int]:
    """The last model, the labels of every batch, and how many backward passes were in closed form."""
    batches, passes = [], []
    whole, backward, fits = Samples.batches, LinearHeads.backward, LinearHeads.fits

    def listed(self, *arguments):
        for inputs, labels in whole(self, *arguments):
            batches.append(labels.tolist())
            yield inputs, labels

    with monkeypatch.context() as patch:
        patch.setattr(Samples, "batches", listed)
        patch.setattr(LinearHeads, "fits", staticmethod(fits if fast else lambda *_: False))
        patch.setattr(LinearHeads, "backward", lambda self, *batch: (passes.append(1), backward(self, *batch)))
        federation = federation_of(method, feature_context(D), overlapping_tasks())
        federation.run(lambda _: None)
    return dict(federation.server.network.state()), batches, len(passes)


def refusal(name: str, setting: str = "plain", over: str = "seen", frozen: bool = False) -> str:
    """What a method says of these knobs; "" where it takes them."""
    try:
        on_features(name, training(**SETTINGS[setting]), loss_classes=over, frozen_heads=frozen)
    except UserError as error:
        return str(error)
    return ""


#: An optimiser works on gradients alone, whatever method they are of: all go with one method, and one with the others.
CASES = [
    *itertools.product(METHODS, ["momentum, decay"], COMPETITION),
    *itertools.product(["fedavg", "scaffold"], SETTINGS, COMPETITION),
    *itertools.product(METHODS, ["rates", "adam"], COMPETITION[:1]),
]


def test_methods_refuse_only_by_saying_so():
    said = {name: refusal(name) for name in METHODS}
    assert said["fedavg"] == ""
    assert all(text.startswith("method.trains=features") for text in said.values() if text), said
    others = {(name, setting, *rest): refusal(name, setting, *rest) for name, setting, rest in CASES if not said[name]}
    keys = {(case[0], text.partition("=")[0]) for case, text in others.items() if text}
    assert keys == {("scaffold", "method.training.optimizer"), ("fedicarl", "method.loss_classes")}


def cases():
    """By default FedAvg in every way, and every other method in one."""
    for name, setting, (over, frozen) in dict.fromkeys(CASES):
        if not refusal(name, setting, over, frozen):
            usual = (setting, over, frozen) == ("momentum, decay", "seen", False) and name != "fedgen"
            yield pytest.param(
                name, setting, over, frozen, marks=[] if usual or name == "fedavg" else [pytest.mark.slow]
            )


@pytest.mark.parametrize(("name", "setting", "over", "frozen"), list(cases()))
def test_every_method_learns_what_it_learns_by_autograd(name, setting, over, frozen, monkeypatch):
    method = on_features(name, training(**SETTINGS[setting]), loss_classes=over, frozen_heads=frozen)
    ours, batches, passes = learnt(method, monkeypatch, fast=True)
    theirs, same_batches, none = learnt(method, monkeypatch, fast=False)
    assert batches == same_batches
    assert none == 0
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=2e-4, atol=2e-5, msg=lambda text, key=key: f"{key}: {text}")
    if name == "fedavg":
        assert passes == len(batches) > 20


# --- which path ---


def network_of(*sizes: int, dimension: int = D) -> Network:
    network = Network(feature_start(dimension))
    network.grow(list(sizes), 3)
    network.freeze(())
    return network


class Tempered(Objective):
    """Another loss, without a word about its gradient."""

    def score_loss(self, scores, labels, inputs):
        return super().score_loss(3 * scores, labels, inputs)


class Told(Tempered):
    """The same with its gradient."""

    calls = 0

    def score_gradient(self, scores, labels, inputs):
        Told.calls += 1
        return 3 * super().score_gradient(3 * scores, labels, inputs)


class Penalised(Told):
    """One more term: the inherited gradient is no longer this loss's."""

    def score_loss(self, scores, labels, inputs):
        return super().score_loss(scores, labels, inputs) + scores.square().mean()


class Whole(Told):
    def loss(self, network, inputs, labels):
        return super().loss(network, inputs, labels) + network.heads[0].weight.square().sum()


class WeightAware(Objective):
    """Looks at a weight besides the logits, though `score_loss` should not."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def score_loss(self, scores, labels, inputs):
        return super().score_loss(scores, labels, inputs) + self.network.heads[0].weight.square().sum()


def gradients(network: Network, backward) -> dict[str, torch.Tensor]:
    network.zero_grad(set_to_none=True)
    backward()
    return {name: value.grad.clone() for name, value in network.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("kind", [Objective, Tempered, Told, Penalised])
def test_a_derived_objective_never_gets_another_ones_gradient(kind):
    network, objective = network_of(3, 2), kind()
    X, y = torch.randn(9, D), torch.arange(9) % 5
    assert LinearHeads.fits(network, objective)
    Told.calls, linear = 0, LinearHeads(network, objective)
    ours = gradients(network, lambda: linear.backward(X, y))
    assert Told.calls == (kind is Told)
    loss = objective.loss(network, X, y)
    theirs = gradients(network, loss.backward)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(linear.loss(), loss.detach())


def test_an_objective_may_be_changed_on_the_object_itself():
    network, objective = network_of(3), Told()
    objective.score_loss = lambda scores, labels, inputs: scores.square().sum()
    X, y = torch.randn(4, D), torch.tensor([0, 1, 2, 0])
    ours = gradients(network, lambda: LinearHeads(network, objective).backward(X, y))
    torch.testing.assert_close(ours["heads.0.weight"], 2 * network(X).detach().T @ X)
    objective.loss = lambda *_: torch.zeros(())
    assert not LinearHeads.fits(network, objective)


def test_a_loss_that_looks_at_weights_besides_has_its_whole_gradient():
    network = network_of(3)
    objective = WeightAware(network)
    X, y = torch.randn(4, D), torch.tensor([0, 1, 2, 0])
    ours = gradients(network, lambda: LinearHeads(network, objective).backward(X, y))
    theirs = gradients(network, lambda: objective.loss(network, X, y).backward())
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6)


class Shifted(Network):
    def logits(self, features):
        return super().logits(features + 1)


class WithParameter(Network):
    def __init__(self, start):
        super().__init__(start)
        self.prompt = torch.nn.Parameter(torch.zeros(1))


def test_what_is_more_than_linear_heads_is_left_to_autograd():
    assert LinearHeads.fits(network_of(3), Objective())
    assert not LinearHeads.fits(network_of(3), Whole())
    for kind in (Shifted, WithParameter):
        other = kind(feature_start(D))
        other.grow([3], 0)
        assert not LinearHeads.fits(other, Objective()), kind
    body = Network(dataclasses.replace(feature_start(D), build=lambda: torch.nn.Linear(D, D)))
    body.grow([3], 0)
    assert not LinearHeads.fits(body, Objective())
    deeper = network_of(3)
    deeper.heads[0] = torch.nn.Sequential(deeper.heads[0])
    assert not LinearHeads.fits(deeper, Objective())


def test_the_wholly_overridden_loss_is_what_is_trained():
    X, y = torch.randn(12, D), torch.arange(12) % 3
    ours, plain = network_of(3), network_of(3)
    Trainer(training(epochs=1, batch_size=12), rows, CPU).train(ours, Samples(X, y), 0.1, 0, Whole())
    optimiser = torch.optim.SGD(plain.parameters(), lr=0.1)
    chosen = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    Whole().loss(plain, X[chosen], y[chosen]).backward()
    optimiser.step()
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


def test_autocast_takes_autograds_way(monkeypatch):
    monkeypatch.setattr(LinearHeads, "backward", lambda *_: pytest.fail("in closed form"))
    X, y = torch.randn(12, D), torch.arange(12) % 3
    Trainer(training(precision="bfloat16"), rows, CPU).train(network_of(3), Samples(X, y), 0.1, 0, Objective())


def test_small_heads_are_trained_by_one_thread_and_others_by_all_of_them():
    found, before = [], torch.get_num_threads()

    class Counting(Objective):
        def modify_gradients(self, network):
            found.append(torch.get_num_threads())
            if len(found) == 3:
                raise KeyboardInterrupt

    X, y = torch.randn(4, 8192), torch.arange(4)
    small, large = Samples(X[:, :D], y), Samples(X, y)
    torch.set_num_threads(3)
    try:
        trainer = Trainer(training(epochs=1, batch_size=64), rows, CPU)
        trainer.train(network_of(4), small, 0.1, 0, Counting())
        trainer.train(network_of(9, dimension=8192), large, 0.1, 0, Counting())
        with pytest.raises(KeyboardInterrupt):
            trainer.train(network_of(4), small, 0.1, 0, Counting())
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert found == [1, 3, 1]


# --- the gradient itself ---


@pytest.mark.parametrize("over", ["seen", "task"])
def test_the_gradient_is_softmax_less_one_hot_where_logits_compete(over):
    heads = Heads(((0, 1, 2, 3), (4, 5)), (1, 4, 5))
    rng = np.random.default_rng(0)
    scores, labels = rng.standard_normal((7, 6)), np.array([1, 4, 5, 5, 1, 4, 4])
    shown = [1, 4, 5] if over == "task" else [0, 1, 2, 3, 4, 5]
    P = np.exp(scores[:, shown])
    expected = np.zeros((7, 6))
    expected[:, shown] = P / P.sum(axis=1, keepdims=True)
    expected[np.arange(7), labels] -= 1
    given = torch.from_numpy(scores)
    found = Objective(heads, over).score_gradient(given, torch.from_numpy(labels), given)
    np.testing.assert_allclose(found.numpy(), expected / 7, rtol=1e-12, atol=1e-15)
    assert np.array_equal(given.numpy(), scores)


def test_direction_sees_gradients_with_decay_and_frozen_heads_have_none():
    network = network_of(3, 2)
    network.freeze({"heads.0.weight"})
    X, y = torch.randn(8, D), torch.arange(8) % 5
    seen = []

    class Looking(Objective):
        def modify_gradients(self, network):
            seen.append({name: value.grad for name, value in network.named_parameters()})
            network.heads[1].weight.grad.zero_()

    before = {name: value.clone() for name, value in network.state_dict().items()}
    scores = network(X)
    loss = torch.nn.functional.cross_entropy(scores, y)
    bias = torch.autograd.grad(loss, network.heads[0].bias)[0]
    Trainer(training(epochs=1, weight_decay=0.5), rows, CPU).train(network, Samples(X, y), 0.1, 0, Looking())
    assert len(seen) == 1
    assert seen[0]["heads.0.weight"] is None
    torch.testing.assert_close(seen[0]["heads.0.bias"], bias + 0.5 * before["heads.0.bias"])
    after = network.state_dict()
    assert {name for name in after if not torch.equal(after[name], before[name])} == {"heads.0.bias", "heads.1.bias"}


@pytest.mark.parametrize("batch_size", [4, 20])
@pytest.mark.parametrize("fast", [True, False])
def test_a_diverging_training_is_the_users_to_mend(batch_size, fast, monkeypatch):
    if not fast:
        monkeypatch.setattr(LinearHeads, "fits", staticmethod(lambda *_: False))
    trainer = Trainer(training(batch_size=batch_size, lr=1e38, weight_decay=0.1), rows, CPU)
    client = Samples(torch.randn(20, D), torch.arange(20) % 3)
    with pytest.raises(UserError, match=r"^method\.training\.lr=1e\+38: training diverged \(a smaller method\.train"):
        trainer.train(network_of(3), client, 1e38, 0, Objective())


def test_a_loss_that_is_not_finite_is_told_even_if_the_weights_are():
    """A score of -inf for the true class: its gradient is finite, its loss is not."""
    network = network_of(2)
    with torch.no_grad():
        network.heads[0].weight.copy_(torch.tensor([[-3e38] * D, [0.0] * D]))
    X, y = torch.full((2, D), 10.0), torch.tensor([0, 0])
    with pytest.raises(UserError, match="training diverged"):
        Trainer(training(epochs=1), rows, CPU).train(network, Samples(X, y), 1e-9, 0, Objective())


# --- runs ---


class TemperedClient(GradientClient):
    def objective(self, client_data, broadcast, state):
        return Tempered(Heads.from_message(broadcast), self.method.loss_classes, self.method.frozen_heads)


def test_a_method_with_its_own_loss_on_logits_needs_nothing_else(monkeypatch):
    monkeypatch.setattr(FedAvg, "client_half", TemperedClient)
    method = FedAvg(training(), trains="features")
    ours, _, passes = learnt(method, monkeypatch, fast=True)
    theirs, *_ = learnt(method, monkeypatch, fast=False)
    assert passes > 20
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=2e-4, atol=2e-5)
