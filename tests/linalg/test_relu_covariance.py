"""The covariance of random features of Gaussians against samples and quadrature."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from fcl_bench.methods.closed_form.algebra.random_features import OwnCovariances, relu_covariance


def covariance(P, Sigma, means, weights, shares=None, factors=None, dtype=torch.float64) -> np.ndarray:
    """Q of classes with `shares` times Sigma and with `factors` (C, d, k) of their own; without them all have Sigma."""
    classes, d = len(weights), len(P)
    shares = np.ones(classes) if shares is None else shares
    factors = np.zeros((classes, d, 0)) if factors is None else factors
    P, Sigma, means, weights, *own = (
        torch.from_numpy(np.asarray(part, dtype=float)).to(dtype)
        for part in (P, Sigma, means, weights, shares, factors)
    )
    return relu_covariance(P, Sigma, OwnCovariances(*own), means, weights).double().numpy()


def drawn(seed: int, d: int, M: int, classes: int):
    """P, Sigma, means and weights; offsets of up to a few standard deviations."""
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((d, d)) * np.linspace(0.2, 1.5, d)
    return (
        rng.standard_normal((d, M)),
        root @ root.T,
        2 * rng.standard_normal((d, classes)),
        rng.integers(1, 9, classes),
    )


@pytest.mark.slow
def test_it_is_the_covariance_of_samples():
    P, Sigma, means, weights = drawn(0, 6, 12, 3)
    Q = covariance(P, Sigma, means, weights)
    rng, samples = np.random.default_rng(1), 400_000
    found = np.zeros_like(Q)
    for mean, weight in zip(means.T, weights, strict=True):
        H = np.maximum(rng.multivariate_normal(mean, Sigma, samples) @ P, 0)
        found += weight * np.cov(H.T)
    scale = np.sqrt(np.outer(np.diag(found), np.diag(found)))
    assert np.abs(np.diag(Q - found) / np.diag(found)).max() < 0.01
    # Off the diagonal, terms of order 3 and more are missing.
    assert np.abs((Q - found) / scale).max() < 0.04
    assert np.linalg.norm(Q - found) < 0.02 * np.linalg.norm(found)


@pytest.mark.parametrize("mean", [-6.0, -2.0, -0.3, 0.0, 0.7, 3.0, 9.0])
@pytest.mark.parametrize("deviation", [1e-6, 0.5, 3.0])
def test_the_diagonal_is_exact(mean, deviation):
    """Var[ReLU(x)], x ~ N(mean deviation, deviation^2), by quadrature in units of the deviation."""
    moments = [
        integrate.quad(lambda u, k=k: max(mean + u, 0.0) ** k * stats.norm.pdf(u), -mean, 40, epsabs=0, epsrel=1e-12)[0]
        for k in (1, 2)
    ]
    expected = deviation**2 * (moments[1] - moments[0] ** 2)
    [[found]] = covariance([[1.0]], [[deviation**2]], [[mean * deviation]], [1])
    # Where the mean is far below zero the variance itself is a difference of small numbers.
    assert found == pytest.approx(expected, rel=1e-7, abs=1e-16 * deviation**2)


@pytest.mark.slow
def test_off_the_diagonal_it_is_the_series_after_order_two():
    """Against the whole double integral: what is missing is of order 3, and small."""
    for rho in (-0.9, -0.3, 0.2, 0.6):
        for a, b in ((0.0, 0.0), (0.5, -1.0), (2.0, 1.0)):
            P, Sigma = np.eye(2), np.array([[1, rho], [rho, 1]])
            nodes, w = np.polynomial.hermite_e.hermegauss(120)
            w = w / w.sum()
            x, y = np.meshgrid(nodes, nodes, indexing="ij")
            second = rho * x + np.sqrt(1 - rho**2) * y
            f, g = np.maximum(a + x, 0), np.maximum(b + second, 0)
            W = np.outer(w, w)
            exact = (W * f * g).sum() - (W * f).sum() * (W * g).sum()
            Q = covariance(P, Sigma, [[a], [b]], [1])
            assert abs(Q[0, 1] - exact) < 0.02 + 0.03 * abs(rho) ** 3
            Phi, phi = stats.norm.cdf([a, b]), stats.norm.pdf([a, b])
            assert Q[0, 1] == pytest.approx(rho * Phi.prod() + rho**2 * phi.prod() / 2, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_symmetric_and_positive_semidefinite(seed, dtype):
    """Of more features than inputs, and of a singular Sigma."""
    P, Sigma, means, weights = drawn(seed, 5, 40, 4)
    if seed % 2:
        Sigma = np.outer(Sigma[0], Sigma[0])
    shares, factors = np.linspace(0, 2, 4), np.random.default_rng(seed).standard_normal((4, 5, 2))
    for own in ({}, {"shares": shares, "factors": factors}):
        Q = covariance(P, Sigma, means, weights, **own, dtype=dtype)
        assert np.abs(Q - Q.T).max() <= 4 * torch.finfo(dtype).eps * np.abs(Q).max()
        values = np.linalg.eigvalsh(Q)
        assert values[0] > -100 * torch.finfo(dtype).eps * values[-1]


def test_features_that_never_cross_zero_are_linear_or_dead():
    """Far from zero ReLU is the identity or nothing, so the covariance is P' Sigma P or 0."""
    P, Sigma, _, _ = drawn(3, 4, 6, 1)
    mean = np.linalg.lstsq(P.T, np.array([1, 1, 1, -1, -1, 1.0]), rcond=None)[0]
    side = np.sign(P.T @ mean)
    Q = covariance(P, Sigma, 1e9 * mean[:, None], [2])
    alive = np.outer(side > 0, side > 0)
    np.testing.assert_allclose(Q, np.where(alive, 2 * P.T @ Sigma @ P, 0), rtol=1e-12, atol=1e-12)


def test_no_variance_and_no_samples_give_zero():
    P, Sigma, means, weights = drawn(4, 4, 6, 3)
    assert not covariance(P, 0 * Sigma, means, weights).any()
    assert not covariance(P, Sigma, means, 0 * weights).any()
    P[:, 2] = 0
    Q = covariance(P, Sigma, means, weights)
    assert np.isfinite(Q).all()
    assert not Q[2].any()
    assert np.diag(Q)[[0, 1, 3, 4, 5]].all()


def test_classes_add_up_by_their_weights():
    P, Sigma, means, weights = drawn(5, 4, 7, 3)
    parts = [weights[c] * covariance(P, Sigma, means[:, [c]], [1]) for c in range(3)]
    np.testing.assert_allclose(covariance(P, Sigma, means, weights), sum(parts), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_covariances_of_single_classes_are_as_if_each_class_were_alone(rank):
    """b Sigma + LL' by its factors and as one matrix; a class may have nothing of Sigma."""
    P, Sigma, means, weights = drawn(6, 4, 7, 3)
    shares, factors = np.array([0, 0.4, 2]), np.random.default_rng(7).standard_normal((3, 4, rank))
    factors[2] = 0
    alone = [
        weights[c] * covariance(P, shares[c] * Sigma + factors[c] @ factors[c].T, means[:, [c]], [1]) for c in range(3)
    ]
    Q = covariance(P, Sigma, means, weights, shares, factors)
    np.testing.assert_allclose(Q, sum(alone), rtol=1e-12, atol=1e-13)
