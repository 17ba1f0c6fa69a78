"""The scatter and the mean of random features if a client's classes were Gaussian."""

from __future__ import annotations

import math

import torch

from fcl_bench.linalg.gram import add_gram, class_sums, gram
from fcl_bench.methods.closed_form.algebra.random_features import relu_covariance

Tensor = torch.Tensor


def deviation(P: Tensor, Sigma: Tensor) -> Tensor:
    """(M,) standard deviations of P'z for z ~ N(., Sigma)."""
    return ((Sigma @ P) * P).sum(0).clamp_min(1e-30).sqrt()


def rectified(mean: Tensor, s: Tensor) -> Tensor:
    """The mean of relu(x) for x ~ N(mean, s^2); mean (M, j), s (M,)."""
    m, s = mean / s[:, None], s[:, None]
    return s * (m * torch.special.ndtr(m) + density(m))


def density(m: Tensor) -> Tensor:
    return torch.exp(-m.square() / 2) / math.sqrt(2 * math.pi)


def modelled(P: Tensor, Sigma: Tensor, means: Tensor, sizes: Tensor, group: Tensor, order: int) -> Tensor:
    """Q (M, M): the scatter of relu(P'z) about the means of groups of Gaussians, in the type of P.

    Args:
        P: (d, M).
        Sigma: (d, d) covariance of every Gaussian.
        means, sizes, group: (d, j), (j,), (j,) means, samples and groups of the Gaussians.
        order: of the Hermite series; its diagonal is exact.
    """
    held = sizes > 0
    Sigma, means, sizes, group = Sigma.to(P), means[:, held].to(P), sizes[held].to(P), group[held]
    Q = relu_covariance(P, Sigma, means, sizes)
    if order != 2:
        move_order(Q, P, Sigma, means, sizes, order)
    _, group = torch.unique(group, return_inverse=True)
    groups = int(group.max()) + 1
    if groups < len(group):
        mean = rectified(P.T @ means, deviation(P, Sigma))
        total = class_sums((mean * sizes).T, group, groups) / torch.bincount(group, sizes, groups)
        add_gram(Q, ((mean - total[:, group]) * sizes.sqrt()).T.contiguous())
    return Q


def move_order(Q: Tensor, P: Tensor, Sigma: Tensor, means: Tensor, sizes: Tensor, order: int) -> None:
    """Let the series of Q end after `order` and not after 2, in place; the diagonal is exact in any case.

    The terms are sum_c n_c a_k a_k' o R^k / k!, a_k = s phi(m) He_k-2(m) up to a sign.
    """
    s, diagonal = deviation(P, Sigma), Q.diagonal().clone()
    scaled = P / s
    R, m = scaled.T @ Sigma @ scaled, (P.T @ means) / s[:, None]
    a, power = s[:, None] * density(m) * sizes.sqrt(), R.square()
    before, hermite = torch.zeros_like(m), torch.ones_like(m)
    if order < 2:
        Q.addcmul_(gram(a.T.contiguous()), power, value=-0.5)
    for k in range(3, order + 1):
        power, before, hermite = power * R, hermite, m * hermite - (k - 3) * before
        Q.addcmul_(gram((a * hermite).T.contiguous()), power, value=1 / math.factorial(k))
    Q.diagonal().copy_(diagonal)
