"""What batch norms have kept, and what a batch has: against NumPy, by finite differences, and at the limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from fcl_bench.methods.data_free.generators.synthesis import Distance, InputStatistics, LayerStatistics, divergence
from fcl_bench.training.network import Network, feature_start
from tests.methods.training_harness import tiny_context


def looked_at(network: nn.Module, images: torch.Tensor) -> list[LayerStatistics]:
    with InputStatistics(network) as statistics:
        network(images)
        return statistics.layers()


def one_norm(mean=(0.0, 1.0, -1.0), variance=(1.0, 2.0, 0.5)) -> nn.Sequential:
    network = nn.Sequential(nn.BatchNorm2d(3)).double().eval()
    with torch.no_grad():
        network[0].running_mean.copy_(torch.tensor(mean))
        network[0].running_var.copy_(torch.tensor(variance))
    return network


def tiny() -> Network:
    """With running statistics of its own."""
    network = Network(tiny_context().network).double()
    network.grow([3], 0)
    network.train().body(torch.randn(9, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    return network.double().eval().requires_grad_(False)


def images(count: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(target_mean: float, target_variance: float, mean: float, variance: float) -> LayerStatistics:
    return LayerStatistics(
        *(torch.tensor([value], dtype=torch.float64) for value in (target_mean, target_variance, mean, variance))
    )


def norms(network: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]


def with_kept(network: nn.Module, batch: torch.Tensor) -> None:
    """Give each layer the batch's statistics, the first first, since later inputs depend on it."""
    for number, norm in enumerate(norms(network)):
        found = looked_at(network, batch)[number]
        norm.running_mean.copy_(found.mean)
        norm.running_var.copy_(found.variance)


# Statistics -----------------------------------------------------------------------------------------------------------


def test_statistics_are_those_of_every_layers_input():
    network, batch = tiny(), images()
    found = looked_at(network, batch)
    assert len(found) == 4
    parts = [module for stage in list(network.body)[:4] for module in stage]
    for number, statistics in enumerate(found):
        inputs = nn.Sequential(*parts[: 3 * number + 1])(batch).numpy()
        np.testing.assert_allclose(statistics.mean, inputs.mean(axis=(0, 2, 3)), atol=1e-12)
        np.testing.assert_allclose(statistics.variance, inputs.var(axis=(0, 2, 3)), atol=1e-12)
        assert torch.equal(statistics.target_mean, norms(network)[number].running_mean)
        assert torch.equal(statistics.target_variance, norms(network)[number].running_var)


def test_looking_changes_nothing_and_leaves_no_hook():
    network, batch = tiny(), images()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    plain = network(batch)
    with InputStatistics(network) as statistics:
        assert torch.equal(network(batch), plain)
        assert not statistics.absent
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(not norm._forward_pre_hooks for norm in norms(network))


def test_a_network_without_batch_norm_has_nothing_to_bring_together():
    network = Network(feature_start(4))
    network.grow([2], 0)
    with InputStatistics(network) as statistics:
        network(torch.randn(3, 4))
        found = statistics.layers()
    assert statistics.absent
    assert found == []
    assert Distance()(found) == divergence(found) == 0


# The measures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [one_norm(), tiny()], ids=["one", "four"])
def test_a_batch_with_the_running_statistics_is_at_no_distance(network):
    batch = images(8).requires_grad_()
    with torch.no_grad():
        with_kept(network, batch)
    far = looked_at(network, 2 * batch + 1)
    assert float(Distance()(far).detach()) > 1
    assert float(divergence(far).detach()) > 0.1
    for measure in (Distance(), divergence):
        found = measure(looked_at(network, batch))
        assert float(found.detach()) == pytest.approx(0, abs=1e-7)
        [gradient] = torch.autograd.grad(found, batch)
        assert bool(torch.isfinite(gradient).all())


def test_distance_is_the_sum_of_norms_over_averages():
    """Three batches on two layers: the first by itself, then 0.9 of what was and 0.1 of the batch."""
    rng = np.random.default_rng(0)
    kept = [(rng.standard_normal(4), rng.random(4) + 0.5) for _ in range(2)]
    batches = [[(rng.standard_normal(4), rng.random(4) + 0.5) for _ in range(2)] for _ in range(3)]
    distance, averages = Distance(), None
    for batch in batches:
        layers = [
            LayerStatistics(*(torch.from_numpy(v) for v in (m, v, mu, s)))
            for (m, v), (mu, s) in zip(kept, batch, strict=True)
        ]
        own = [np.stack(pair) for pair in batch]
        mixed = own if averages is None else [0.9 * old + 0.1 * new for old, new in zip(averages, own, strict=True)]
        expected = sum(
            np.sqrt(((v - mix[1]) ** 2).sum()) + np.sqrt(((m - mix[0]) ** 2).sum())
            for (m, v), mix in zip(kept, mixed, strict=True)
        )
        for _ in range(2):  # to look does not move the averages
            assert float(distance(layers)) == pytest.approx(expected, rel=1e-12)
        distance.keep(layers)
        averages = mixed


def test_the_averages_take_no_gradient():
    network, distance = one_norm(), Distance()
    first, second = images(seed=1).requires_grad_(), images(seed=2).requires_grad_()
    distance.keep(looked_at(network, first))
    distance(looked_at(network, second)).backward()
    assert first.grad is None
    alone = images(seed=2).requires_grad_()
    Distance()(looked_at(network, alone)).backward()
    assert float(second.grad.norm()) < 0.5 * float(alone.grad.norm())


@pytest.mark.parametrize("name", ["distance", "distance after a batch", "divergence"])
def test_gradients_are_finite_differences(name):
    network, batch = one_norm(), images(3)
    measure = divergence if name == "divergence" else Distance()
    if name == "distance after a batch":
        measure.keep(looked_at(network, images(4, seed=9)))
    batch.requires_grad_()
    measure(looked_at(network, batch)).backward()
    for place in ((0, 0, 0, 0), (1, 1, 3, 5), (2, 2, 7, 7)):
        step = torch.zeros_like(batch)
        step[place] = 1e-5
        with torch.no_grad():
            up, down = (float(measure(looked_at(network, batch + s))) for s in (step, -step))
        assert (up - down) / 2e-5 == pytest.approx(float(batch.grad[place]), rel=1e-5)


def test_divergence_by_hand():
    """v = 1, m = 0: nothing at s = 1, mu = 0; log 2 - (1 - 1/4) / 2 at s = 4; 1/2 at mu = 1."""
    assert float(divergence([layer(0, 1, 0, 1)])) == 0
    assert float(divergence([layer(0, 1, 0, 4)])) == pytest.approx(0.318147, abs=5e-7)
    assert float(divergence([layer(0, 1, 0, 4)])) == pytest.approx(math.log(2) - 0.5 * (1 - 0.25), rel=1e-12)
    assert float(divergence([layer(0, 1, 1, 1)])) == pytest.approx(0.5)
    assert float(divergence([layer(3, 2, 1, 5)])) == pytest.approx(0.5 * math.log(2.5) - 0.5 * (1 - 6 / 5))


def test_divergence_is_that_of_normal_laws():
    found = float(divergence([layer(0.3, 2.0, -0.4, 1.2)]))
    kept, batch = torch.distributions.Normal(0.3, 2**0.5), torch.distributions.Normal(-0.4, 1.2**0.5)
    assert found == pytest.approx(float(torch.distributions.kl_divergence(kept, batch)), rel=1e-6)


def test_divergence_is_a_mean_over_channels_and_then_over_layers():
    wide = [layer(0, 1, 0, 4), layer(0, 1, 0, 1), layer(0, 1, 0, 1)]
    joined = LayerStatistics(*(torch.cat([getattr(one, f) for one in wide]) for f in vars(wide[0])))
    found = float(divergence([joined, layer(0, 1, 1, 1)]))
    assert found == pytest.approx((0.31814718 / 3 + 0.5) / 2, rel=1e-6)
