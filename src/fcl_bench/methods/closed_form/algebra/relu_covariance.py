"""The covariance of random features H = ReLU(Z P), or H = Z P, of Gaussian Z, in closed form."""

from __future__ import annotations

import math

import torch

from fcl_bench.linalg.gram import gram
from fcl_bench.linalg.product import product

#: A mean beyond this many standard deviations makes a feature linear or dead to the last bit of float64.
_FAR = 40.0


def linear_covariance(P: torch.Tensor, Sigma: torch.Tensor) -> torch.Tensor:
    """P' Sigma P (M, M), symmetric to the bit: the covariance of Z P, for P (d, M) and the covariance Sigma (d, d)."""
    R = product(P.T, product(Sigma, P))
    return (R + R.T).div_(2)


def relu_covariance(P: torch.Tensor, Sigma: torch.Tensor, means: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Q = sum_c n_c Cov[ReLU(P'z)], z ~ N(mu_c, Sigma): the Hermite (Mehler) series after order 2, exact diagonal.

    With s_i^2 = p_i' Sigma p_i, R = corr(P' Sigma P), m_c = P'mu_c / s, and Phi, phi the normal distribution function
    and density:

        Q = R o sum_c n_c c1_c c1_c' + (1/2) R o R o sum_c n_c c2_c c2_c',   c1_c = s Phi(m_c),   c2_c = s phi(m_c)
        Q_ii = sum_c n_c s_i^2 {(m^2 + 1) Phi + m phi - (m Phi + phi)^2}

    Q is positive semidefinite: Schur products of such matrices, and a diagonal that is no smaller than theirs.

    Args:
        P: (d, M).
        Sigma: (d, d) symmetric, positive semidefinite; the covariance of each class.
        means: (d, C).
        weights: (C,) n_c, at least 0.

    Returns:
        (M, M), symmetric.
    """
    R = linear_covariance(P, Sigma)
    scale = R.diagonal().clamp_min(0).sqrt()
    inverse = torch.where(scale > 0, 1 / scale, 0)
    R.mul_(inverse).mul_(inverse.unsqueeze(1))
    m = ((means.T @ P) * inverse).clamp(-_FAR, _FAR)
    Phi, phi = torch.special.ndtr(m), torch.exp(-m.square() / 2) / math.sqrt(2 * math.pi)
    roots = weights.to(m).sqrt().unsqueeze(1) * scale
    Q = gram(roots * Phi).mul_(R)
    Q.add_(gram(roots * phi).mul_(R.square_()), alpha=0.5)
    # The variance over s^2, in a form whose terms do not cancel where m is large.
    exact = m.square() * Phi * torch.special.ndtr(-m) + Phi + m * phi * (1 - 2 * Phi) - phi.square()
    cut = Phi.square() + phi.square() / 2  # the series after order 2, never larger except by rounding
    Q.diagonal().copy_((roots.square() * torch.maximum(exact, cut)).sum(dim=0))
    return Q
