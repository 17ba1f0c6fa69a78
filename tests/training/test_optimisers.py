"""Steps of clients and of the server, against plain loops and formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.data.images.batches import Samples
from fcl_bench.linalg.tensors import average
from fcl_bench.methods.gradient.robust import ServerOptimiser
from fcl_bench.protocol.state import restore, saved
from fcl_bench.training.knobs import SGD, Training, client_optimiser
from fcl_bench.training.network import Network, feature_start
from fcl_bench.training.objective import Objective
from fcl_bench.training.trainer import Trainer, rows

CPU = torch.device("cpu")


def network() -> Network:
    made = Network(feature_start(5))
    made.grow([2, 3], seed=1)
    return made


def trained(knobs: Training, rate: float | None = None) -> Network:
    made = network()
    X, y = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 5
    rate = knobs.lr if rate is None else rate
    Trainer(knobs, rows, CPU).train(made, Samples(X, y), rate, 3, Objective())
    return made


def by_torch(make, epochs: int, decay: float) -> Network:
    """Whole batches, so that their order does not matter."""
    made = network()
    X, y = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 5
    optimiser = make(made)
    for _ in range(epochs):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(made(X), y).backward()
        for weight in made.parameters():
            weight.grad += decay * weight.data
        optimiser.step()
    return made


def close(a: Network, b: Network) -> None:
    for name, value in a.state().items():
        torch.testing.assert_close(value, b.state()[name], rtol=1e-5, atol=1e-6)


KNOBS = {"epochs": 4, "batch_size": 12, "lr": 0.02, "weight_decay": 0.1, "augment": "none"}


@pytest.mark.parametrize(
    ("name", "make", "decay"),
    [
        ("sgd", lambda net: torch.optim.SGD(net.parameters(), lr=0.02), 0.1),
        ("adam", lambda net: torch.optim.Adam(net.parameters(), lr=0.02), 0.1),
        ("adamw", lambda net: torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1), 0.0),
    ],
)
def test_a_round_takes_the_optimisers_steps(name, make, decay):
    close(trained(Training(optimizer=name, **KNOBS)), by_torch(make, 4, decay))


def test_parameters_of_a_prefix_have_a_step_size_of_their_own_on_the_same_schedule():
    def groups(net):
        own = dict(net.named_parameters())
        rates = {"heads.0.weight": 0.3, "heads.0.bias": 0.2, "heads.1.weight": 0.01, "heads.1.bias": 0.01}
        return torch.optim.SGD([{"params": [own[key]], "lr": rate} for key, rate in rates.items()])

    knobs = Training(rates={"heads.0": 0.6, "heads.0.bias": 0.4}, **KNOBS)
    close(trained(knobs, rate=0.01), by_torch(groups, 4, 0.1))  # half the first rate, so half of all


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs_bit_for_bit(momentum):
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(5, 3)) for _ in range(4)]
    theirs = [torch.nn.Parameter(value.detach().clone()) for value in ours]
    plain = SGD([{"params": ours[:2], "lr": 0.3}, {"params": ours[2:], "lr": 0.07}], momentum)
    torchs = torch.optim.SGD([{"params": theirs[:2], "lr": 0.3}, {"params": theirs[2:], "lr": 0.07}], 1, momentum)
    for step in range(5):
        plain.zero_grad()
        torchs.zero_grad()
        assert all(value.grad is None for value in ours)
        # The first never has a gradient, and the second none at first.
        moving = slice(2 if step == 0 else 1, None)
        for mine, other in zip(ours[moving], theirs[moving], strict=True):
            mine.grad = torch.randn(5, 3)
            other.grad = mine.grad.clone()
        plain.step()
        torchs.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_frozen_parameters_are_in_no_group():
    made = network()
    made.freeze(["heads.0.weight", "heads.0.bias"])
    optimiser = client_optimiser(made, Training(rates={"heads.0": 1.0}), 0.1)
    kept = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    assert [id(parameter) for parameter in kept] == [id(made.heads[1].weight), id(made.heads[1].bias)]


def models(rounds: int) -> list[dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(2)
    return [
        {"w": torch.randn(4, 3, generator=rng), "n.running_mean": torch.randn(3, generator=rng)} for _ in range(rounds)
    ]


def stepped(knobs: Training, means: list[dict[str, torch.Tensor]], optimiser: ServerOptimiser | None = None):
    optimiser = optimiser or ServerOptimiser(knobs)
    old = {name: torch.zeros_like(value) for name, value in means[0].items()}
    path = []
    for mean in means:
        old = optimiser.step(old, mean)
        path.append(old)
    return path


def test_momentum_without_momentum_is_the_average():
    means = models(3)
    for new, mean in zip(
        stepped(Training(server_optimizer="momentum", server_momentum=0.0), means), means, strict=True
    ):
        torch.testing.assert_close(new["w"], mean["w"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_the_server_steps_by_the_formula(kind):
    means = models(4)
    w, v, s = np.zeros((4, 3)), np.zeros((4, 3)), np.full((4, 3), 1e-3**2)
    for mean, new in zip(
        means, stepped(Training(server_optimizer=kind, server_lr=0.3, server_momentum=0.8), means), strict=True
    ):
        change = mean["w"].numpy().astype(float) - w
        if kind == "momentum":
            v = 0.8 * v + change
            w = w + 0.3 * v
        else:
            v, s = 0.8 * v + 0.2 * change, 0.99 * s + 0.01 * change**2
            w = w + 0.3 * v / (np.sqrt(s) + 1e-3)
        w = w.astype(np.float32).astype(float)
        np.testing.assert_allclose(new["w"].numpy(), w, rtol=1e-6)
        assert torch.equal(new["n.running_mean"], mean["n.running_mean"])


def test_fedadam_is_algorithm_2_of_reddi_et_al():
    """By hand, one weight: v_-1 = tau^2 = 1e-6, no bias correction, clients' models 0.5 and then 0.25."""
    knobs = Training(server_optimizer="adam", server_lr=0.1, server_momentum=0.9)
    optimiser = ServerOptimiser(knobs)
    first = optimiser.step({"w": torch.tensor([0.0])}, {"w": torch.tensor([0.5])})
    # m = 0.1 * 0.5, v = 0.99e-6 + 0.01 * 0.25, x = 0.1 * m / (sqrt(v) + 1e-3)
    assert float(first["w"]) == pytest.approx(0.1 * 0.05 / (0.00250099**0.5 + 1e-3), rel=1e-6)
    change = 0.25 - float(first["w"])
    m, v = 0.9 * 0.05 + 0.1 * change, 0.99 * 0.00250099 + 0.01 * change**2
    second = optimiser.step(first, {"w": torch.tensor([0.25])})
    assert float(second["w"]) == pytest.approx(float(first["w"]) + 0.1 * m / (v**0.5 + 1e-3), rel=1e-6)


def test_fedadam_barely_moves_for_changes_far_below_tau_and_by_its_step_size_far_above():
    """tau is what a change is small or large against: the first step is lr (1 - m) change / (sqrt(v_0) + tau)."""
    for change, step in ((1e-6, 0.1 * 1e-6 / (0.99**0.5 * 1e-3 + 1e-3)), (100.0, 0.1 * 100 / (0.1 * 100 + 1e-3))):
        knobs = Training(server_optimizer="adam", server_lr=1.0, server_momentum=0.9)
        new = ServerOptimiser(knobs).step({"w": torch.tensor([0.0])}, {"w": torch.tensor([change])})
        assert float(new["w"]) == pytest.approx(step, rel=1e-4)


def test_fedavgm_carries_a_constant_change_on_to_lr_over_one_minus_m():
    knobs = Training(server_optimizer="momentum", server_lr=0.5, server_momentum=0.8)
    optimiser, old, steps = ServerOptimiser(knobs), {"w": torch.tensor([0.0], dtype=torch.float64)}, []
    for _ in range(60):
        new = optimiser.step(old, {"w": old["w"] + 1})
        steps.append(float(new["w"] - old["w"]))
        old = {"w": new["w"].double()}
    assert steps[0] == 0.5
    assert steps[-1] == pytest.approx(0.5 / (1 - 0.8), rel=1e-4)


def test_a_parameter_that_comes_later_starts_as_all_did():
    """The head of a new task."""
    optimiser = ServerOptimiser(Training(server_optimizer="adam"))
    zero, mean = {"a": torch.zeros(1), "b": torch.zeros(1)}, {"a": torch.ones(1), "b": torch.ones(1)}
    alone = optimiser.step({"a": zero["a"]}, {"a": mean["a"]})["a"]
    assert torch.equal(optimiser.step(zero, mean)["b"], alone)


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_the_servers_optimiser_survives_being_saved(kind):
    knobs, means = Training(server_optimizer=kind), models(4)
    whole = stepped(knobs, means)
    first = ServerOptimiser(knobs)
    half = stepped(knobs, means[:2], first)
    second = ServerOptimiser(knobs)
    state = {name: value.clone() for name, value in saved(first, first.state).items()}
    restore(second, second.state, state, torch.device("cpu"))
    old = half[-1]
    for mean, wanted in zip(means[2:], whole[2:], strict=True):
        old = second.step(old, mean)
        assert torch.equal(old["w"], wanted["w"])


def test_the_average_is_weighted():
    sums = {"w": torch.tensor([6.0], dtype=torch.float64)}
    assert average(sums, 4.0)["w"].tolist() == [1.5]
