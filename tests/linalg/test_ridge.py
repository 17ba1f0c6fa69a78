"""Ridges from the statistics against cross-validation that holds the samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.methods.closed_form.algebra.ridge import Spectrum, gcv, mean_share
from fcl_bench.methods.closed_form.ridge import Estimate

CPU = torch.device("cpu")
CANDIDATES = np.geomspace(1e-4, 1e4, 33)


def drawn(seed: int, samples: int = 60, size: int = 25, classes: int = 4, noise: float = 1.0):
    """H (n, M) and one-hot Y (n, C) that H tells with some noise."""
    rng = np.random.default_rng(seed)
    H = rng.standard_normal((samples, size)) * np.geomspace(3, 0.05, size)
    scores = H @ rng.standard_normal((size, classes)) + noise * rng.standard_normal((samples, classes))
    return H, np.eye(classes)[scores.argmax(axis=1)]


def plain_scores(H, Y, ridges) -> np.ndarray:
    """N RSS / (N - df)^2 with the N x N matrix that maps labels to their predictions."""
    found = []
    for ridge in ridges:
        hat = H @ np.linalg.solve(H.T @ H + ridge * np.eye(H.shape[1]), H.T)
        residual = Y - hat @ Y
        found.append(len(H) * np.square(residual).sum() / (len(H) - np.trace(hat)) ** 2)
    return np.array(found)


def estimate_of(H, low_rank: bool) -> Estimate:
    made = Estimate(H.shape[1], torch.float64, CPU, low_rank)
    for rows in np.array_split(H, 3):
        made.add_factor(torch.from_numpy(rows.T.copy()))
    return made


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("samples", "size"), [(60, 25), (20, 45)])
def test_gcv_is_the_best_of_its_candidates_by_the_samples_themselves(seed, samples, size):
    H, Y = drawn(seed, samples, size)
    B = torch.from_numpy(H.T @ Y)
    for low_rank in (False, True):
        spectrum = estimate_of(H, low_rank).spectrum(B)
        chosen = gcv(spectrum, samples, torch.from_numpy(CANDIDATES))
        assert chosen == pytest.approx(CANDIDATES[plain_scores(H, Y, CANDIDATES).argmin()])


@pytest.mark.parametrize("offset", [0.0, 0.7])
def test_an_offset_is_part_of_the_matrix(offset):
    H, Y = drawn(3, 20, 45)
    B = torch.from_numpy(H.T @ Y)
    factors, whole = (estimate_of(H, low_rank).spectrum(B).shifted(offset) for low_rank in (True, False))
    values = np.linalg.eigvalsh(H.T @ H) + offset
    for spectrum in (factors, whole):
        assert spectrum.mean == pytest.approx(values.mean())
        assert float(spectrum.multiplicity.sum()) == 45
        assert float(spectrum.energies.sum()) == pytest.approx(float(B.square().sum()))
    repeated = torch.repeat_interleave(factors.values, factors.multiplicity.long()).sort().values
    np.testing.assert_allclose(repeated, values, atol=1e-10)
    assert gcv(factors, 20) == pytest.approx(gcv(whole, 20))


def test_labels_without_noise_want_the_smallest_ridge_and_noise_alone_the_largest():
    rng = np.random.default_rng(0)
    H = rng.standard_normal((200, 10))
    Y = H @ rng.standard_normal((10, 3))
    Y /= np.linalg.norm(Y) / 200**0.5  # the sum of squares is N, as of one-hot labels
    candidates = torch.from_numpy(CANDIDATES)
    assert gcv(estimate_of(H, False).spectrum(torch.from_numpy(H.T @ Y)), 200, candidates) == CANDIDATES[0]
    noise = rng.standard_normal((200, 3))
    noise -= H @ np.linalg.lstsq(H, noise, rcond=None)[0]  # nothing of it is in the features
    noise *= 200**0.5 / np.linalg.norm(noise)
    assert gcv(estimate_of(H, False).spectrum(torch.from_numpy(H.T @ noise)), 200, candidates) == CANDIDATES[-1]


def test_statistics_that_fit_no_ridge_are_told():
    """Class sums larger than the Gram matrix allows: every residual is below zero."""
    one = torch.ones(1, dtype=torch.float64)
    assert gcv(Spectrum(one, 1e30 * one, one), 10) is None


def test_the_share_is_a_hundredth_of_the_mean_eigenvalue():
    assert mean_share(500.0, 100) == pytest.approx(0.05)
    assert mean_share(0.0, 100) > 0
