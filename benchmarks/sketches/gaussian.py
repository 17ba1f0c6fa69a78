"""The scatter and the mean of random features if a client's classes were Gaussian."""

from __future__ import annotations

import math
from functools import cached_property

import torch

from fcl_bench.linalg.gram import add_gram, class_sums, gram

Tensor = torch.Tensor


class Covariance:
    """Of P'z for z ~ N(., Sigma): standard deviations s (M,) and correlations R (M, M) in the type of P."""

    def __init__(self, Sigma: Tensor, P: Tensor) -> None:
        values, vectors = torch.linalg.eigh(Sigma)
        kept = values > values[-1] * 1e-12
        self.root = (vectors[:, kept] * values[kept].sqrt()).T.to(P) @ P
        self.s = torch.linalg.vector_norm(self.root, dim=0).clamp_min(1e-30)

    @cached_property
    def R(self) -> Tensor:
        return gram((self.root / self.s).contiguous())


def rectified(mean: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For x ~ N(mean, s^2): m = mean/s, Phi(m), phi(m), and the mean of relu(x); mean (M, j), s (M,)."""
    m = mean / s[:, None]
    Phi, phi = torch.special.ndtr(m), torch.exp(-m.square() / 2) / math.sqrt(2 * math.pi)
    return m, Phi, phi, s[:, None] * (m * Phi + phi)


def modelled(P: Tensor, C: Covariance, means: Tensor, sizes: Tensor, group: Tensor, order: int) -> Tensor:
    """Q (M, M): the scatter of relu(P'z) about the means of its groups, for `sizes` samples of each N(means, Sigma).

    Hermite series: Cov[relu(x_i), relu(x_j)] = sum_k a_ik a_jk R_ij^k / k!, a_1 = s Phi(m), a_k = s phi(m) He_k-2(m) up
    to a sign; the diagonal is exact.
    """
    held = sizes > 0
    means, sizes, group = means[:, held].to(P), sizes[held].to(P), group[held]
    m, Phi, phi, mean = rectified(P.T @ means, C.s)
    weight, s = sizes.sqrt(), C.s[:, None]
    Q = gram(((s * Phi) * weight).T.contiguous()).mul_(C.R)
    power, before, hermite = C.R, torch.zeros_like(m), torch.ones_like(m)
    for k in range(2, order + 1):
        power = power * C.R
        Q.addcmul_(gram(((s * phi * hermite) * weight).T.contiguous()), power, value=1 / math.factorial(k))
        before, hermite = hermite, m * hermite - (k - 2) * before
    variance = (s.square() * ((m.square() + 1) * Phi + m * phi) - mean.square()).clamp_min(0)
    Q.diagonal().copy_((variance * sizes).sum(1))
    _, group = torch.unique(group, return_inverse=True)
    groups = int(group.max()) + 1
    if groups < len(group):
        total = class_sums((mean * sizes).T, group, groups) / torch.bincount(group, sizes, groups)
        add_gram(Q, ((mean - total[:, group]) * weight).T.contiguous())
    return Q


def leading_directions(G: Tensor, q: int) -> Tensor:
    """About the q leading eigenvectors of a positive semidefinite G, by subspace iteration."""
    X = torch.randn(len(G), min(q, len(G)), generator=torch.Generator().manual_seed(0), dtype=G.dtype)
    for _ in range(5):
        X = torch.linalg.qr(G @ X)[0]
    return X @ torch.linalg.eigh(X.T @ G @ X)[1].flip(1)
