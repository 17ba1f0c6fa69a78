"""What a client sends: the rank of its sketch, and the upload as the server has it, rounded and counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fcl_bench.linalg.gram import gram
from sketches.gaussian import deviation, modelled, rectified
from sketches.local import Local
from sketches.rounding import factor_bytes, rounded, rounded_sums, sums_bytes
from sketches.variants import Variant

Tensor = torch.Tensor


@dataclass
class Sent:
    """An upload as the server has it.

    Attributes:
        V: (M, r) orthonormal basis of what is known of A'A, and `factor` (M, r) whose square that is.
        rest: the energy of A outside it.
        S, S_z, n: class sums and counts.
        sigma: (d, d) sum of squares of the deviations in backbone features.
        means, sizes, group: the client's Gaussians.
        samples: n.
    """

    V: Tensor
    factor: Tensor
    rest: float
    S: Tensor
    S_z: Tensor
    n: Tensor
    sigma: Tensor
    means: Tensor
    sizes: Tensor
    group: Tensor
    up: int = 0

    @property
    def samples(self) -> float:
        return float(self.n.sum())


def ranks_of(v: Variant, clients: Sequence[Local]) -> list[int]:
    """How many directions each client sends."""
    if v.remainder == "exact":
        return [0] * len(clients)
    if v.linear:
        return [v.linear] * len(clients)
    spectra = [one.hidden.top.sigma.square() for one in clients]
    equal = [min(v.rank, len(values)) for values in spectra]
    if v.ranks == "equal":
        return equal
    if v.ranks == "capped":
        spectra, total = [values[: v.rank] for values in spectra], 3 * sum(equal) // 4
    else:
        total = sum(equal)
    if v.ranks == "relative":
        spectra = [values / one.hidden.energy for values, one in zip(spectra, clients, strict=True)]
    owner = torch.cat([torch.full((len(values),), number) for number, values in enumerate(spectra)])
    chosen = owner[torch.cat(spectra).argsort(descending=True)[:total]]
    return torch.bincount(chosen, minlength=len(clients)).tolist()


def leading_directions(G: Tensor, q: int) -> Tensor:
    """About the q leading eigenvectors of a positive semidefinite G, by subspace iteration."""
    X = torch.randn(len(G), min(q, len(G)), generator=torch.Generator().manual_seed(0), dtype=G.dtype)
    for _ in range(5):
        X = torch.linalg.qr(G @ X)[0]
    return X @ torch.linalg.eigh(X.T @ G @ X)[1].flip(1)


class Uploads:
    """One variant's clients: what they send, and the bytes of it."""

    def __init__(self, variant: Variant, P: Tensor, P_remainder: Tensor) -> None:
        self.variant, self.P, self.P_remainder = variant, P, P_remainder

    def of(self, one: Local, rank: int, basis: Tensor | None) -> Sent:
        """What the client sends, rounded and counted."""
        v, (M, c) = self.variant, one.S.shape
        if v.remainder == "exact":
            return self._whole(one)
        sigma, S_z, means, up = self._of_inputs(one)
        V, values = one.hidden.top
        V, values = rounded(V[:, :rank], v.bits, v.fine), values[:rank]
        factor = V * values
        up += factor_bytes(M, V.shape[1], v.bits, v.fine) + sums_bytes(M, c, v.sums_bits) + 4 * c + 4
        if v.own_basis:
            Q = modelled(self.P_remainder, sigma / one.n.sum(), means, one.sizes, one.group, v.order)
            basis = leading_directions(Q, v.own_basis).to(V)
        if basis is not None:
            extra, R = torch.linalg.qr(basis - V @ (V.T @ basis))
            extra = extra[:, R.diagonal().abs() > 1e-6]
            inner = gram(one.hidden.A @ extra)
            lengths, turn = torch.linalg.eigh(inner)
            V, factor = torch.cat([V, extra], 1), torch.cat([factor, extra @ turn * lengths.clamp_min(0).sqrt()], 1)
            up += inner.shape[0] * (inner.shape[0] + 1) + 4  # the upper triangle in 16 bits, and a scale
        rest = max(one.hidden.energy - float(factor.square().sum()), 0.0)
        up += 2 * M if v.diagonal == "hidden" else 0
        S = one.S
        if v.predicted:
            guess = rectified(self.P.T @ means, deviation(self.P, sigma / one.n.sum())) * one.n
            S = guess + rounded_sums(S - guess, v.sums_bits)
        else:
            S = rounded_sums(S, v.sums_bits)
        return Sent(V, factor, rest, S, S_z, one.n, sigma, means, one.sizes, one.group, self._secure(one, up))

    def _of_inputs(self, one: Local) -> tuple[Tensor, Tensor, Tensor, int]:
        """The scatter (d, d), class sums and means of the backbone's features, and the bytes that tell them."""
        v, c, d = self.variant, len(one.n), len(one.S_z)
        if v.remainder == "isotropic":
            return self.P.new_zeros(d, d), one.S_z, one.means, 0
        bits = 32 if v.bits >= 32 else 16
        U, omega = one.inputs.top
        U, omega = rounded(U[:, : v.input_rank], v.bits), omega[: v.input_rank]
        j = one.means.shape[1] if v.clusters > 1 else c
        up = factor_bytes(d, U.shape[1], v.bits) + sums_bytes(d, j, bits) + 4 * (j - c) + 4
        sigma = gram((U * omega).T.contiguous())
        if v.diagonal == "input":
            sigma.diagonal().add_((one.inputs.A.square().sum(0) - sigma.diagonal()).clamp_min(0))
            up += 2 * d
        elif d > U.shape[1]:
            tau = max(one.inputs.energy - float(omega.square().sum()), 0.0) / (d - U.shape[1])
            sigma -= tau * U @ U.T
            sigma.diagonal().add_(tau)
        return sigma, rounded_sums(one.S_z, bits), rounded_sums(one.means, bits), up

    def _secure(self, one: Local, up: int) -> int:
        """Bytes of the upload; if it only adds up, numbers of 32 bits for modular sums."""
        v, (M, c), d = self.variant, one.S.shape, len(one.S_z)
        s = v.linear_inputs or v.linear
        inputs = d * (d + 1) // 2 if s >= d else d * s
        return 4 * (M * v.linear + inputs + (M + d + 1) * c + 2) if v.linear else up

    def _whole(self, one: Local) -> Sent:
        """The Gram matrix itself, its upper triangle in float32."""
        M, c = one.S.shape
        nothing = one.S.new_zeros(M, 0)
        up, flat = 4 * (M * (M + 1) // 2 + M * c), self.P.new_zeros(len(self.P), len(self.P))
        return Sent(nothing, nothing, 0.0, one.S, one.S_z, one.n, flat, one.means, one.sizes, one.group, up)
