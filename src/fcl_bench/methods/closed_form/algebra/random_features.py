"""Random features: one shared projection, drawn from a seed, followed by ReLU, cosine or nothing; their covariance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch

from fcl_bench.linalg.gram import product
from fcl_bench.linalg.structure import mirror

#: If H is computed in blocks: the largest number of bytes per block, and the smallest number of rows.
_BLOCK_BYTES, _BLOCK_ROWS = 2**26, 256
#: Activations after the projection: ReLU or none; and the cosine, which has a bandwidth.
ACTIVATIONS = ("relu", "none")
FOURIER = "cos"
#: About what a block of rows of a covariance of random features takes, so that it stays in the processor's cache.
_TILE_BYTES = 2**21
#: A mean beyond this many standard deviations makes a feature linear or dead to the last bit of float64.
_FAR = 40.0
#: Projections in use in this process, by what determines them.
_DRAWN: WeakValueDictionary[tuple[object, ...], torch.Tensor] = WeakValueDictionary()


class RandomFeatures:
    """H = ReLU(Z P) (FedRAN Eq. 6), P (d, M) with independent N(0, 1) entries; with M None the identity, H = Z.

    Without an activation H = Z P, as in FedRAN's ablation (Fig. 7): every classifier on H is then one on Z.

    With "cos" they are random Fourier features (Rahimi and Recht), H = sqrt(2/M) cos(Z P + u): P has N(0, 1/b^2)
    entries for the bandwidth b, u is uniform on [0, 2 pi), and h'h* approximates exp(-|z - z*|^2 / (2 b^2)) with an
    error of order 1/sqrt(M).

    P and u are drawn in float64 on the CPU from the seed, so every client, device and `dtype` gets the same ones. Maps
    of one process with the same P share it, as the server and its clients do: no one may write to it.

    Args:
        seed: the seed that the server sends instead of the matrix.
        inputs: d.
        outputs: M, or None.
        dtype, device: type and device of P and of the result of `map`.
        activation: "relu", "none" or "cos".
        bandwidth: b; for cosines only.
        maps: how many independent maps lie side by side in H, of M / maps features each.
        clip: rows of H that are longer are shortened to this length; None: they are not.
    """

    def __init__(
        self,
        seed: int,
        inputs: int,
        outputs: int | None,
        dtype: torch.dtype,
        device: torch.device,
        activation: str = "relu",
        bandwidth: float = 1.0,
        maps: int = 1,
        clip: float | None = None,
    ) -> None:
        self.outputs = inputs if outputs is None else outputs
        self.activation, self.maps, self.clip = activation, maps, clip
        self.projection: torch.Tensor | None = None
        self.phases: torch.Tensor | None = None
        if outputs is not None and activation == FOURIER:
            rng = torch.Generator().manual_seed(seed)
            drawn = torch.randn(inputs, outputs, generator=rng, dtype=torch.float64).div_(bandwidth)
            phases = 2 * math.pi * torch.rand(outputs, generator=rng, dtype=torch.float64)
            self.projection, self.phases = drawn.to(device, dtype), phases.to(device, dtype)
        elif outputs is not None:
            self.projection = _drawn(seed, inputs, outputs, dtype, device)

    @classmethod
    def given(
        cls,
        projection: torch.Tensor,
        activation: str,
        phases: torch.Tensor | None = None,
        maps: int = 1,
        clip: float | None = None,
    ) -> RandomFeatures:
        """The map of a projection (d, M), and phases (M,) for cosines, that were sent whole instead of as a seed."""
        features = cls.__new__(cls)
        features.outputs, features.activation, features.maps = projection.shape[1], activation, maps
        features.projection, features.phases, features.clip = projection, phases, clip
        return features

    def map(self, z: torch.Tensor) -> torch.Tensor:
        """H (n, M) of features `z` (n, d)."""
        H = z if self.projection is None else product(self.projection.T, z.T).T
        if self.phases is not None:
            H = H.add_(self.phases).cos_().mul_(math.sqrt(2 * self.maps / self.outputs))
        elif self.projection is not None and self.activation == "relu":
            H = H.relu_()
        return H if self.clip is None else clipped_rows(H, self.clip)

    def blocks(self, z: torch.Tensor) -> Iterator[torch.Tensor]:
        """H in blocks of `rows` rows, so that the whole of it is never in memory."""
        return map(self.map, z.split(self.rows))

    @property
    def rows(self) -> int:
        """The number of samples per block."""
        return max(_BLOCK_ROWS, _BLOCK_BYTES // (8 * self.outputs))


def _drawn(seed: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """P (d, M) with independent N(0, 1) entries, shared while anyone in this process uses it."""
    key = seed, inputs, outputs, dtype, str(device)
    P = _DRAWN.get(key)
    if P is None:
        rng = torch.Generator().manual_seed(seed)
        P = _DRAWN[key] = torch.randn(inputs, outputs, generator=rng, dtype=torch.float64).to(device, dtype)
    return P


def clipped_rows(H: torch.Tensor, clip: float) -> torch.Tensor:
    """H (n, M) whose rows longer than `clip` are shortened to it."""
    lengths = torch.linalg.vector_norm(H, dim=1, keepdim=True)
    return H * (clip / lengths.clamp_min(clip))


def mean_squared_distance(total: torch.Tensor, squares: float, samples: int) -> float:
    """The mean of |z - z*|^2 over all pairs of `samples` samples, from sum z (d,) and sum |z|^2: 2 tr Cov(z).

    Its root replaces the median distance as the bandwidth; unlike the median, it follows from sums over any partition.
    """
    if not samples:
        return 0.0
    return 2 * max(squares / samples - float((total / samples).square().sum()), 0.0)


class OwnCovariances(NamedTuple):
    """Sigma_c = b_c Sigma + L_c L_c' of each class c, for one Sigma that all share.

    Attributes:
        shares: (C,) b_c, at least 0.
        factors: (C, d, k) L_c.
    """

    shares: torch.Tensor
    factors: torch.Tensor


def relu_covariance(
    P: torch.Tensor, Sigma: torch.Tensor, own: OwnCovariances, means: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Q = sum_c n_c Cov[ReLU(P'z)], z ~ N(mu_c, Sigma_c): the Hermite (Mehler) series after order 2, exact diagonal.

    With A_c = P' Sigma_c P, s^2 its diagonal, m = P'mu_c / s, and Phi, phi the normal distribution function and
    density of m:

        Q = sum_c n_c {A_c o Phi Phi' + (1/2) A_c o A_c o (phi/s)(phi/s)'}
        Q_ii = sum_c n_c s_i^2 {(m^2 + 1) Phi + m phi - (m Phi + phi)^2}

    A_c and its square are computed for some rows at a time, above the diagonal, so that Q is the only M x M matrix.

    Q is positive semidefinite: Schur products of such matrices, and a diagonal that is no smaller than theirs.

    Args:
        P: (d, M).
        Sigma: (d, d) symmetric, positive semidefinite.
        own: what Sigma_c is beside it.
        means: (d, C).
        weights: (C,) n_c, at least 0.

    Returns:
        (M, M), symmetric.
    """
    projected, n = product(Sigma, P), weights.to(P).unsqueeze(1)
    F = own.factors.mT @ P  # (C, k, M)
    variances = own.shares.unsqueeze(1) * (P * projected).sum(dim=0).clamp_min(0) + F.square().sum(dim=1)
    scale = variances.sqrt()
    inverse = torch.where(scale > 0, 1 / scale, 0)
    m = ((means.T @ P) * inverse).clamp(-_FAR, _FAR)
    Phi, phi = torch.special.ndtr(m), torch.exp(-m.square() / 2) / math.sqrt(2 * math.pi)
    first, second = n.sqrt() * Phi * (scale > 0), (n / 2).sqrt() * phi * inverse
    M = P.shape[1]
    Q = P.new_zeros(M, M)
    rows = max(1, _TILE_BYTES // (P.element_size() * M))
    for start in range(0, M, rows):
        own_rows, others = slice(start, start + rows), slice(start, M)
        R, block = P[:, own_rows].T @ projected[:, others], Q[own_rows, others]
        for b, F_c, one, two in zip(own.shares.tolist(), F, first, second, strict=True):
            A = torch.addmm(R, F_c[:, own_rows].T, F_c[:, others], beta=b)
            block.addcmul_(A, (A * two[others]).mul_(two[own_rows].unsqueeze(1)).addr_(one[own_rows], one[others]))
    mirror(Q)
    # The variance over s^2, in a form whose terms do not cancel where m is large.
    exact = m.square() * Phi * torch.special.ndtr(-m) + Phi + m * phi * (1 - 2 * Phi) - phi.square()
    cut = Phi.square() + phi.square() / 2  # the series after order 2, never larger except by rounding
    Q.diagonal().copy_((n * variances * torch.maximum(exact, cut)).sum(dim=0))
    return Q


def relu_sums(
    P: torch.Tensor,
    Sigma: torch.Tensor,
    own: OwnCovariances,
    sums: torch.Tensor,
    sizes: torch.Tensor,
    energies: torch.Tensor,
) -> torch.Tensor:
    """S (M, c): the class sums of ReLU(P'z) over one client's samples, if they were drawn from Gaussian classes.

    Of n samples of a class, with the mean mu = sum z / n and the energy e of the deviations from it, s^2 is the
    diagonal of P' Sigma_c P times (e / n) / tr Sigma_c: the shape is the class's, the spread the client's. With
    m = P'mu / s:

        S_c = n E[ReLU(P'z)] = n s (m Phi(m) + phi(m)),   n ReLU(P'mu) where s = 0

    Args:
        P, Sigma, own: as of `relu_covariance`.
        sums: (d, c) of the client's z.
        sizes, energies: (c,) n and e.
    """
    n = sizes.to(sums).clamp_min(1)
    R = (P * (Sigma @ P)).sum(dim=0).clamp_min(0)
    variances = own.shares.unsqueeze(1) * R + (own.factors.mT @ P).square().sum(dim=1)
    traces = own.shares * Sigma.trace() + own.factors.square().sum(dim=(1, 2))
    spread = torch.where(traces > 0, energies / (n * traces), 0)
    s = (spread.unsqueeze(1) * variances).sqrt()
    centre = (sums / n).T @ P
    m = torch.where(s > 0, centre / s, 0).clamp(-_FAR, _FAR)
    phi = torch.exp(-m.square() / 2) / math.sqrt(2 * math.pi)
    expected = torch.where(s > 0, centre * torch.special.ndtr(m) + s * phi, centre.relu())
    return (sizes.to(sums).unsqueeze(1) * expected).T
