"""Random Fourier features: what kernel they approximate, how well, and what bandwidth the sums give."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from fcl_bench.methods.closed_form.algebra.random_features import RandomFeatures, mean_squared_distance
from tests.methods import discriminant_oracle as oracle

CPU = torch.device("cpu")


def fourier(outputs: int, bandwidth: float, seed: int = 0, maps: int = 1) -> RandomFeatures:
    return RandomFeatures(seed, 5, outputs, torch.float64, CPU, "cos", bandwidth, maps)


@pytest.mark.parametrize("bandwidth", [0.5, 2.0, 10.0])
def test_products_approximate_the_gaussian_kernel_within_three_over_root_m(bandwidth):
    """M 2e5. One product has a standard deviation below 1/sqrt(M), so 3/sqrt(M) is three of them; 10 pairs."""
    M = 200_000
    Z = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 5)))
    H = fourier(M, bandwidth).map(Z)
    pairs = np.triu_indices(5, 1)
    kernel = np.exp(-((Z[:, None] - Z[None]) ** 2).sum(dim=2).numpy() / (2 * bandwidth**2))
    assert np.abs((H @ H.T).numpy() - kernel)[pairs].max() < 3 / M**0.5
    assert np.abs((H @ H.T).numpy().diagonal() - 1).max() < 3 / M**0.5


def test_a_map_is_the_one_that_its_projection_and_phases_say():
    features = fourier(40, 3.0)
    Z = np.random.default_rng(1).standard_normal((7, 5))
    expected = oracle.fourier(Z, features.projection.numpy(), features.phases.numpy())
    assert np.abs(features.map(torch.from_numpy(Z)).numpy() - expected).max() < 1e-14
    given = RandomFeatures.given(features.projection, "cos", features.phases)
    assert torch.equal(given.map(torch.from_numpy(Z)), features.map(torch.from_numpy(Z)))


def test_projection_and_phases_have_the_laws_they_should():
    features = fourier(20_000, 4.0)
    assert float(features.projection.std()) == pytest.approx(1 / 4, rel=0.01)
    phases = features.phases.numpy()
    assert 0 <= phases.min() < phases.max() < 2 * np.pi
    assert np.histogram(phases, bins=4, range=(0, 2 * np.pi))[0] == pytest.approx(5000, abs=4 * 5000**0.5)
    # The bandwidth scales the projection and leaves the draw alone.
    assert torch.allclose(fourier(50, 2.0).projection, 2 * fourier(50, 4.0).projection, rtol=1e-15)
    assert torch.equal(fourier(50, 2.0).phases, fourier(50, 4.0).phases)


def test_each_of_several_maps_is_normalised_by_itself():
    Z = torch.from_numpy(np.random.default_rng(1).standard_normal((3, 5)))
    H = fourier(3 * 5000, 2.0, maps=3).map(Z)
    for own in H.chunk(3, dim=1):
        assert own.square().sum(dim=1).numpy() == pytest.approx(1, abs=3 / 5000**0.5)


def test_relu_features_are_what_they_were():
    """The draw of a seed, and so every result with it, is what it was before there were other kinds."""
    features = RandomFeatures(7, 5, 6, torch.float64, CPU)
    drawn = torch.randn(5, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    Z = torch.from_numpy(np.random.default_rng(1).standard_normal((3, 5)))
    assert torch.equal(features.projection, drawn)
    assert torch.equal(features.map(Z), (Z @ drawn).relu())
    linear = RandomFeatures(7, 5, 6, torch.float64, CPU, "none")
    assert torch.equal(linear.map(Z), Z @ drawn)
    assert torch.equal(RandomFeatures.given(drawn, "none").map(Z), Z @ drawn)
    assert features.phases is None


@pytest.mark.slow
def test_maps_of_one_seed_share_a_projection_as_long_as_one_of_them_lives():
    def made(seed: int = 7, outputs: int = 6, dtype: torch.dtype = torch.float64) -> RandomFeatures:
        return RandomFeatures(seed, 5, outputs, dtype, CPU)

    first, others = made(), (made(8), made(outputs=3), made(dtype=torch.float32))
    assert made().projection is first.projection
    for other in others:
        assert other.projection.data_ptr() != first.projection.data_ptr()
    assert torch.equal(others[-1].projection, first.projection.float())
    before, gone = first.projection.clone(), weakref.ref(first.projection)
    del first
    gc.collect()
    assert gone() is None
    assert torch.equal(made().projection, before)


def test_the_mean_squared_distance_is_that_of_all_pairs():
    Z = np.random.default_rng(0).standard_normal((50, 4)) * [1, 2, 3, 4] + 5
    found = mean_squared_distance(torch.from_numpy(Z.sum(axis=0)), float((Z**2).sum()), 50)
    assert found == pytest.approx(oracle.mean_squared_distance(Z), rel=1e-12)
    assert mean_squared_distance(torch.zeros(4), 0.0, 0) == 0
    # By hand: 0 and 2 on a line; of four pairs two are 4 apart.
    assert mean_squared_distance(torch.tensor([2.0]), 4.0, 2) == 2
