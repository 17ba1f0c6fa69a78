"""Errors on held-out samples from sums, folds, and what generalised cross-validation is made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.methods.closed_form.algebra.ridge import Spectrum, gcv, residual_sums
from fcl_bench.methods.closed_form.ranpac import (
    Sums,
    fold_numbers,
    hash_factors,
    held_out_errors,
    least,
    squared_error,
)
from fcl_bench.randomness import generator
from tests.methods import ranpac_oracle as oracle


def samples_of(seed: int, n: int, M: int, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    return rng.standard_normal((n, M)) + 0.3 * rng.standard_normal((classes, M))[labels], np.eye(classes)[labels]


def sums_of(H: np.ndarray, Y: np.ndarray) -> Sums:
    return Sums(torch.from_numpy(H.T @ H), torch.from_numpy(H.T @ Y), len(H))


def spectrum_of(H: np.ndarray, Y: np.ndarray) -> Spectrum:
    values, U = np.linalg.eigh(H.T @ H)
    energies = ((U.T @ H.T @ Y) ** 2).sum(axis=1)
    values = np.maximum(values, 0)
    return Spectrum(*map(torch.from_numpy, (values, energies, np.ones_like(values))))


@pytest.mark.parametrize("seed", range(5))
def test_the_squared_error_from_sums_is_that_of_the_samples(seed):
    """tr(W'G W) - 2 tr(W'S) + n for a W that has nothing to do with these samples."""
    H, Y = samples_of(seed, 30, 12)
    W = np.random.default_rng(seed + 100).standard_normal((12, 4))
    assert squared_error(torch.from_numpy(W), sums_of(H, Y)) == pytest.approx(((Y - H @ W) ** 2).sum(), rel=1e-12)


@pytest.mark.parametrize("M", [6, 25, 80])
def test_held_out_errors_are_those_of_the_fits_on_the_other_samples(M):
    """With more and with fewer features than samples."""
    H, Y = samples_of(1, 60, M)
    grid = oracle.GRID[6:]  # NumPy's own solve of a singular system is no reference below
    fold = np.arange(60) % 3
    others, held = (sums_of(H[own], Y[own]) for own in (fold != 0, fold == 0))
    found = held_out_errors(others, held, grid).numpy()
    np.testing.assert_allclose(found, oracle.cross_validation(H, Y, fold, [0], grid), rtol=1e-9)


def test_of_errors_equal_to_rounding_the_first_is_the_least():
    assert least(torch.tensor([5.0, 3.0 + 1e-14, 3.0, 4.0], dtype=torch.float64), 10) == 1
    assert least(torch.tensor([5.0, 3.0 + 1e-9, 3.0, 4.0], dtype=torch.float64), 10) == 2


@pytest.mark.parametrize("M", [6, 40, 90])
def test_the_residual_from_sums_is_that_of_the_samples(M):
    """To 1e-12 of the samples' number: what is to be found is the difference of N and what is explained."""
    H, Y = samples_of(3, 50, M)
    ridges = torch.tensor(oracle.GRID[4:], dtype=torch.float64)
    found = residual_sums(spectrum_of(H, Y), 50, ridges).numpy()
    direct = [((Y - H @ oracle.ridge_regression(H, Y, float(ridge))) ** 2).sum() for ridge in ridges]
    assert np.abs(found - direct).max() < 1e-12 * 50


def test_a_perfect_fit_has_the_residual_that_the_ridge_makes_and_no_rounding_on_top():
    """Y = H W: what is left is sum lambda^2 e / (l (l + lambda)^2), far below the rounding of N."""
    rng = np.random.default_rng(4)
    Y = np.eye(3)[np.arange(60) % 3]
    H = np.concatenate([Y, rng.standard_normal((60, 5))], axis=1) @ np.linalg.qr(rng.standard_normal((8, 8)))[0]
    spectrum = spectrum_of(H, Y)
    ridges = torch.tensor(oracle.GRID[:9], dtype=torch.float64)
    found = residual_sums(spectrum, 60, ridges)
    values, energy, _ = spectrum
    exact = torch.stack([(r**2 * energy / values / (values + r) ** 2).sum() for r in ridges])
    torch.testing.assert_close(found - found[0], exact - exact[0], rtol=1e-6, atol=1e-25)
    assert gcv(spectrum, 60, ridges) == 1e-8


@pytest.mark.parametrize("seed", range(4))
def test_gcv_is_close_to_leaving_one_out(seed):
    H, Y = samples_of(seed, 60, 20)
    grid = oracle.GRID[6:13]
    loo, scores = oracle.leave_one_out(H, Y, grid), oracle.gcv_scores(H, Y, grid)
    np.testing.assert_allclose(scores / loo, 1, atol=0.1)
    chosen = gcv(spectrum_of(H, Y), 60, torch.tensor(grid))
    assert chosen == grid[int(scores.argmin())]
    assert loo[grid.index(chosen)] < 1.05 * loo.min()


def test_a_fold_is_the_documented_hash_of_the_values():
    Z = np.random.default_rng(5).standard_normal((300, 7)) * np.geomspace(1e-3, 1e6, 7)
    Z[::7, 2] = 0
    factors = hash_factors(generator(9, "folds"), 7)
    found = fold_numbers(torch.from_numpy(Z), factors, 5)
    np.testing.assert_array_equal(found.numpy(), oracle.folds_of(Z, 9, 5))
    # In single precision it is the same, and zero has one fold whatever its sign.
    assert torch.equal(fold_numbers(torch.from_numpy(Z.astype(np.float32)), factors, 5), found)
    Z[::7, 2] = -0.0
    assert torch.equal(fold_numbers(torch.from_numpy(Z), factors, 5), found)
    assert not torch.equal(fold_numbers(torch.from_numpy(Z), hash_factors(generator(8, "folds"), 7), 5), found)


@pytest.mark.parametrize("folds", [2, 5, 7])
@pytest.mark.parametrize("kind", ["normal", "whole", "one feature"])
def test_folds_are_about_equally_large(kind, folds):
    """Within five standard deviations, of real features, of whole numbers with many zeros, of a single feature."""
    rng = np.random.default_rng(6)
    Z = {
        "normal": rng.standard_normal((4000, 10)),
        "whole": rng.integers(0, 4, (4000, 30)).astype(float),
        "one feature": rng.random((4000, 1)),
    }[kind]
    sizes = torch.bincount(fold_numbers(torch.from_numpy(Z), hash_factors(rng, Z.shape[1]), folds), minlength=folds)
    expected = 4000 / folds
    assert float((sizes - expected).abs().max()) < 5 * (expected * (1 - 1 / folds)) ** 0.5
