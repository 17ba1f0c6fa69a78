"""The terms that shape made-up images, against plain loops and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fcl_bench.methods.data_free.generators.images import ImageGenerator
from fcl_bench.methods.data_free.generators.synthesis import LayerStatistics, divergence, moments
from fcl_bench.methods.data_free.mfcl import blurred, imbalance


def test_a_batch_of_all_classes_alike_is_balanced_and_one_of_a_single_class_is_not():
    scores = torch.full((8, 4), -40.0, dtype=torch.float64)
    scores[torch.arange(8), torch.arange(8) % 4] = 40.0
    assert float(imbalance(scores)) == pytest.approx(0, abs=1e-12)
    assert float(imbalance(torch.zeros(3, 7, dtype=torch.float64))) == pytest.approx(0, abs=1e-12)
    one = torch.zeros(5, 4, dtype=torch.float64)
    one[:, 2] = 900
    assert float(imbalance(one)) == pytest.approx(1, abs=1e-12)
    assert float(imbalance(torch.randn(5, 1))) == 0


def test_the_imbalance_is_its_formula_and_its_gradient_a_finite_difference():
    scores = np.random.default_rng(0).standard_normal((6, 5)) * 3

    def formula(q: np.ndarray) -> float:
        e = np.exp(q - q.max(axis=1, keepdims=True))
        p = (e / e.sum(axis=1, keepdims=True)).mean(axis=0)
        return 1 + sum(value * math.log(value) for value in p) / math.log(5)

    given = torch.from_numpy(scores).requires_grad_()
    found = imbalance(given)
    assert float(found.detach()) == pytest.approx(formula(scores), abs=1e-12)
    found.backward()
    for row, column in ((0, 0), (3, 4), (5, 2)):
        step = np.zeros_like(scores)
        step[row, column] = 1e-6
        wanted = (formula(scores + step) - formula(scores - step)) / 2e-6
        assert float(given.grad[row, column]) == pytest.approx(wanted, abs=1e-9)


def test_an_impossible_class_leaves_the_imbalance_finite():
    scores = torch.zeros(4, 3).index_fill(1, torch.tensor([1]), -1e4).requires_grad_()
    imbalance(scores).backward()
    assert bool(torch.isfinite(scores.grad).all())


@pytest.mark.parametrize("sigma", [1.0, 2**0.5])
def test_blurring_is_a_mean_of_25_pixels_with_mirrored_borders(sigma):
    images = np.random.default_rng(1).standard_normal((2, 3, 4, 6))
    found = blurred(torch.from_numpy(images), sigma).numpy()
    for y in range(4):
        for x in range(6):
            total, mass = np.zeros((2, 3)), 0.0
            for dy in range(-2, 3):
                for dx in range(-2, 3):
                    weight = math.exp(-(dy * dy + dx * dx) / (2 * sigma**2))
                    at_y, at_x = abs(y + dy), abs(x + dx)
                    at_y, at_x = 6 - at_y if at_y > 3 else at_y, 10 - at_x if at_x > 5 else at_x
                    total += weight * images[:, :, at_y, at_x]
                    mass += weight
            np.testing.assert_allclose(found[:, :, y, x], total / mass, atol=1e-12)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_moments_are_those_of_torch_with_their_gradients(layout):
    maps = torch.randn(3, 4, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    maps = maps.to(memory_format=layout).requires_grad_()
    variance, mean = torch.var_mean(maps, dim=(0, 2, 3), correction=0)
    torch.testing.assert_close(moments(maps), (mean, variance))
    assert torch.autograd.gradcheck(moments, (maps,))


def statistics(v: float, m: float, s: float, mu: float) -> LayerStatistics:
    """Of one channel: kept variance and mean, the batch's variance and mean."""
    return LayerStatistics(*(torch.tensor([value], dtype=torch.float64) for value in (m, v, mu, s)))


def test_the_divergence_by_hand():
    assert float(divergence([statistics(1, 0, 1, 0)])) == 0
    assert float(divergence([statistics(1, 0, 4, 0)])) == pytest.approx(0.318147, abs=5e-7)
    assert float(divergence([statistics(1, 0, 4, 0)])) == pytest.approx(math.log(2) - 0.375, abs=1e-12)
    # log 1 - (1 - (1 + 4) / 1) / 2
    assert float(divergence([statistics(1, 2, 1, 0)])) == pytest.approx(2, abs=1e-12)
    both = [statistics(1, 0, 4, 0), statistics(1, 2, 1, 0)]
    assert float(divergence(both)) == pytest.approx((2.318147) / 2, abs=5e-7)


@pytest.mark.parametrize(("width", "noise", "size", "trained"), [(128, 1000, 32, 8_423_939), (6, 5, 10, None)])
def test_the_generator_has_the_parameters_of_the_formula(width, noise, size, trained):
    generator = ImageGenerator(noise, size, "tanh", 0.8, width)
    w, half, s = width, width // 2, -(-size // 4)
    formula = w * s**2 * (noise + 1) + 2 * w + (9 * w * w + w) + 2 * w
    formula += (9 * w * half + half) + 2 * half + 27 * half + 3
    assert sum(value.numel() for value in generator.parameters()) == formula
    assert trained in (None, formula)
    running = 2 * (w + w + half + 3)
    assert sum(value.nbytes for value in generator.state().values()) == 4 * (formula + running)
    assert [generator.first_norm.eps, generator.second_norm.eps, generator.third_norm.eps] == [1e-5, 0.8, 0.8]
