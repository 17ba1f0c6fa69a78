"""Variants of the centred sketch with a Gaussian remainder, each against bytes and accuracy: one table.

    .venv/bin/python benchmarks/sketch_variants.py --features FILE.npz --clients 5 --beta 0.1 --seeds 0 1 2
    .venv/bin/python benchmarks/sketch_variants.py --features FILE.npz --only base "bits 4"

One pass over clients and tasks serves all variants: they share random features and decompositions, and each has its own
server. A variant is the base with some of its knobs changed (`Variant`, `variants`). Everything that a variant uploads
is rounded as it would be on the wire and counted; `up` is the most that one client sends for one task, `down` the most
that it receives. The base is the method of docs/centred_sketch.md with remainder=gaussian and ridge=auto. What came of
it: docs/sketch_variants.md.
"""

from __future__ import annotations

import argparse
import bz2
import importlib
import json
import lzma
import math
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fcl_bench.data.partitions.dirichlet import Dirichlet
from fcl_bench.data.partitions.holdings import Holdings
from fcl_bench.data.sources.base import Dataset
from fcl_bench.data.sources.feature_file import FeatureFile
from fcl_bench.data.splits.class_incremental import ClassIncremental
from fcl_bench.linalg.gram import add_gram, class_sums, gram
from fcl_bench.linalg.random_features import RandomFeatures
from fcl_bench.linalg.ridge import AUTO, GCV, SHARE, gcv, mean_share
from fcl_bench.linalg.ridge import Spectrum as Eigenvalues
from fcl_bench.linalg.score_scaling import score_scales
from fcl_bench.linalg.solve import solve_symmetric
from fcl_bench.linalg.spectral import Spectrum, summarise
from fcl_bench.methods.closed_form.centred_sketch import deviations
from fcl_bench.randomness import derived_seed, generator

Tensor = torch.Tensor
#: Directions of a client's spectrum that are found at most, for variants that share ranks out unevenly, per base rank.
MOST = 4
#: More directions than there are.
ALL = 10**6
#: As a ridge: what `auto` gives after the first task, for all tasks.
FIRST = "first"


@dataclass(frozen=True)
class Variant:
    """One way to sketch; the defaults are the base: Gaussian remainder, 8-bit factors, 16-bit sums.

    Args:
        rank, input_rank: directions of random features (r) and of backbone features (k).
        remainder: what the dropped energy is taken for: gaussian, isotropic, or exact (the full Gram matrix).
        mix: isotropic share of the remainder; `mix_samples` m makes it m / (m + n) for a client with n samples.
        order: of the Hermite series.
        bits: per number of a factor (32: float32); `fine` leading columns have 8 whatever the others have.
        sums_bits: per number of the class sums S; `predicted`: of what the Gaussian does not predict of them.
        ranks: equal; total (largest eigenvalues of all clients first, the total that equal ranks have); relative (of
            each client's eigenvalues over its energy); capped (three quarters of that total, none above the rank).
        diagonal: the remainder's exact diagonal is sent: "hidden" (M numbers) or "input" (d numbers, for Sigma).
        centre: local class means, or "global" ones, which take a round more.
        subspace: q of the server's leading directions that are broadcast; clients send their part in them.
        own_basis: q leading directions of the client's own Gaussian model, which the server knows from the upload; the
            client sends its part in them.
        clusters: Gaussians per class and client, by k-means.
        own_counts: weigh classes in each client's remainder by its counts, not by the task's.
        own_means: the client's class means in place of the task's.
        own_sigma: share of the client's own covariance in Sigma.
        linear: s random vectors, for uploads that only add up: Nystroem from the sum of A'A Omega.
        linear_inputs: the same for the backbone's features (d or more: all of Z'Z); 0: as many as `linear`.
        difference: sketch A'A less the client's own Gaussian model of it, and not A'A.
        ridge: lambda, or auto (`share` of the mean eigenvalue, after each task), or first (auto's of the first task,
            kept), or gcv.
    """

    name: str = "base"
    rank: int = 32
    input_rank: int = 32
    remainder: str = "gaussian"
    mix: float = 0.3
    mix_samples: float = 0.0
    order: int = 2
    bits: int = 8
    fine: int = 0
    sums_bits: int = 16
    predicted: bool = False
    ranks: str = "equal"
    diagonal: str = ""
    centre: str = "local"
    subspace: int = 0
    own_basis: int = 0
    clusters: int = 1
    own_counts: bool = False
    own_means: bool = False
    own_sigma: float = 0.0
    linear: int = 0
    linear_inputs: int = 0
    difference: bool = False
    ridge: float | str = AUTO
    share: float = SHARE


def variants(rank: int = 32, k: int = 32) -> list[Variant]:
    """All that is tried, with base ranks `rank` and `k`."""
    base = Variant("base", rank=rank, input_rank=k)
    plain = {"bits": 32, "sums_bits": 32}
    sums = {"predicted": True, "sums_bits": 4}
    factors = {"bits": 4, "fine": rank // 4, "rank": 2 * rank}
    changes: dict[str, dict] = {
        "base": {},
        "not rounded": plain,
        "not rounded, ridge 1e-3": {"ridge": 1e-3, **plain},
        "full Gram": {"remainder": "exact"},
        "full Gram, ridge 1e-3": {"remainder": "exact", "ridge": 1e-3},
        "isotropic": {"remainder": "isotropic"},
        "base r/2": {"rank": rank // 2},
        "base r*2": {"rank": rank * 2},
        "base k/2": {"input_rank": k // 2},
        "base k*2": {"input_rank": k * 2},
        "a ranks by energy, same total": {"ranks": "total"},
        "a ranks by energy share, same total": {"ranks": "relative"},
        "a ranks by energy, 3/4 of the total, same most": {"ranks": "capped"},
        "b diagonal, M numbers": {"diagonal": "hidden"},
        "b diagonal, d numbers": {"diagonal": "input"},
        "b isotropic, diagonal, M numbers": {"remainder": "isotropic", "diagonal": "hidden"},
        "c global class means": {"centre": "global"},
        "d server's q = r directions": {"subspace": rank},
        "d server's q = 4 r directions": {"subspace": 4 * rank},
        "e two clusters per class": {"clusters": 2},
        "e own class means": {"own_means": True},
        "f ridge 1e-3": {"ridge": 1e-3},
        "f ridge 100": {"ridge": 100.0},
        "f ridge 1e4": {"ridge": 1e4},
        "f auto, 0.3 %": {"share": 0.003},
        "f auto, 3 %": {"share": 0.03},
        "f auto of the first task, kept": {"ridge": FIRST},
        "f gcv": {"ridge": GCV},
        "h linear, s = r/4": {"linear": rank // 4, **plain},
        "h linear, s = r": {"linear": rank, **plain},
        "h linear, s = 4 r": {"linear": 4 * rank, **plain},
        "h linear, s = r/4, all of Z'Z": {"linear": rank // 4, "linear_inputs": ALL, "input_rank": ALL, **plain},
        "h linear, s = r, all of Z'Z": {"linear": rank, "linear_inputs": ALL, "input_rank": ALL, **plain},
        "h linear, s = r, isotropic": {"linear": rank, "remainder": "isotropic", **plain},
        "i bits 4": {"bits": 4},
        "i bits 4, r*2": {"bits": 4, "rank": rank * 2},
        "i bits 4 but r/4 at 8, r*2": factors,
        "i bits 3, r*2": {"bits": 3, "rank": rank * 2},
        "i sums 8 bits": {"sums_bits": 8},
        "i sums predicted, 8 bits": {"predicted": True, "sums_bits": 8},
        "i sums predicted, 4 bits": sums,
        "i mix 300 / (300 + n)": {"mix_samples": 300.0},
        "i mix 0.1": {"mix": 0.1},
        "i mix 0.5": {"mix": 0.5},
        "i order 1": {"order": 1},
        "i order 3": {"order": 3},
        "i order 8": {"order": 8},
        "i own counts": {"own_counts": True},
        "i own counts, sigma half own": {"own_counts": True, "own_sigma": 0.5},
        "i difference to own model": {"difference": True},
        "i own model's q = r directions": {"own_basis": rank},
        "i own model's q = 4 r directions": {"own_basis": 4 * rank},
        "j d numbers, sums predicted in 4 bits": {"diagonal": "input", **sums},
        "j the same, r*2 in 4 bits but r/4 at 8": {"diagonal": "input", **sums, **factors},
        "j the same, server's q = 4 r directions": {"diagonal": "input", **sums, **factors, "subspace": 4 * rank},
    }
    return [replace(base, name=name, **change) for name, change in changes.items()]


@dataclass
class Deviations:
    """A (n, M), the rows less their class mean, and what is asked of it.

    Attributes:
        A: (n, M).
        most: directions that are found at most.
    """

    A: Tensor
    most: int

    @cached_property
    def energy(self) -> float:
        return float(self.A.square().sum())

    @cached_property
    def top(self) -> Spectrum:
        return summarise(self.A, min(self.most, self.A.shape[1]))[0]


@dataclass
class Local:
    """What one client has of one task, before anything is rounded.

    Attributes:
        which: (n,) class of each sample, 0 to c - 1.
        n: (c,) counts.
        S, S_z: (M, c), (d, c) class sums of random and of backbone features.
        hidden, inputs: deviations of both.
        means, sizes, group: (d, j), (j,), (j,) of its Gaussians: means of backbone features, samples, class.
    """

    which: Tensor
    n: Tensor
    S: Tensor
    S_z: Tensor
    hidden: Deviations
    inputs: Deviations
    means: Tensor
    sizes: Tensor
    group: Tensor

    @classmethod
    def of(cls, Z: Tensor, H: Tensor, which: Tensor, classes: int, most: int, most_inputs: int) -> Local:
        n = torch.bincount(which, minlength=classes).to(H)
        S, S_z = class_sums(H, which, classes), class_sums(Z, which, classes)
        hidden, inputs = Deviations(deviations(H, which, S), most), Deviations(deviations(Z, which, S_z), most_inputs)
        return cls(which, n, S, S_z, hidden, inputs, S_z / n.clamp_min(1), n, torch.arange(classes))

    def centred(self, S: Tensor, S_z: Tensor, n: Tensor) -> Local:
        """The same with the deviations from the means S / n, S_z / n of others."""
        moved = [
            Deviations(old.A + (own / self.n.clamp_min(1) - total / n.clamp_min(1)).T[self.which], old.most)
            for old, own, total in ((self.hidden, self.S, S), (self.inputs, self.S_z, S_z))
        ]
        return replace(self, hidden=moved[0], inputs=moved[1])

    def clustered(self) -> Local:
        """Two Gaussians per class, by k-means within the class; the first cut is across the leading direction."""
        A, classes = self.inputs.A, len(self.n)
        part = (A @ self.inputs.top.V[:, 0] > 0).long()
        for _ in range(10):
            code = 2 * self.which + part
            size = torch.bincount(code, minlength=2 * classes).to(A)
            means = class_sums(A, code, 2 * classes) / size.clamp_min(1)
            distance = torch.stack([(A - means.T[2 * self.which + i]).square().sum(1) for i in (0, 1)])
            distance[torch.stack([size[2 * self.which + i] == 0 for i in (0, 1)])] = torch.inf
            part = distance.argmin(0)
        code = 2 * self.which + part
        sizes, sums = torch.bincount(code, minlength=2 * classes).to(A), class_sums(A, code, 2 * classes)
        group = torch.arange(classes).repeat_interleave(2)
        means = (self.S_z / self.n.clamp_min(1))[:, group] + sums / sizes.clamp_min(1)
        inputs = Deviations(deviations(A, code, sums), self.inputs.most)
        return replace(self, inputs=inputs, means=means, sizes=sizes, group=group)


def rounded(V: Tensor, bits: int, fine: int = 0) -> Tensor:
    """Columns of V as integers of `bits` bits times max |v|, renormalised; the first `fine` in 8 bits; 32: as it is."""
    if bits >= 32 or not V.shape[1]:
        return V
    levels = torch.full((V.shape[1],), 2.0 ** (bits - 1) - 1, dtype=V.dtype)
    levels[:fine] = 127
    scale = V.abs().amax(0) / levels
    V = (V / scale).round() * scale
    return V / torch.linalg.vector_norm(V, dim=0)


def rounded_sums(S: Tensor, bits: int) -> Tensor:
    """Columns of S in 16-bit floating point or as integers of fewer bits, each with a scale; 32: as they are."""
    if bits >= 32:
        return S
    largest = S.abs().amax(0)
    scale = torch.where(largest > 0, largest, 1.0)
    if bits == 16:
        return (S / scale).half().to(S) * scale
    levels = 2.0 ** (bits - 1) - 1
    return (S / scale * levels).round() * scale / levels


def factor_bytes(rows: int, columns: int, bits: int, fine: int = 0) -> int:
    """Of unit columns, each with a scale and a singular value in float32."""
    whole = rows * (8 * min(fine, columns) + bits * (columns - min(fine, columns)))
    return math.ceil(whole / 8) + (4 if bits >= 32 else 8) * columns


def sums_bytes(rows: int, columns: int, bits: int) -> int:
    return math.ceil(rows * columns * bits / 8) + (0 if bits >= 32 else 4 * columns)


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


def add_remainders(G: Tensor, Q: Tensor, sent: Sequence[Sent], mixes: Sequence[float]) -> None:
    """G += sum of rest [(1 - mix) Pi Q Pi / tr(Pi Q Pi) + mix Pi / (M - r)], Pi = I - V V', in place."""
    V = torch.cat([one.V for one in sent], dim=1).to(Q)
    QV, left, first, second = Q @ V, [], 0.0, 0.0
    for one, part, mix in zip(sent, QV.split([one.V.shape[1] for one in sent], dim=1), mixes, strict=True):
        own = one.V.to(Q)
        inner, M, r = own.T @ part, len(Q), own.shape[1]
        trace = float(Q.diagonal().sum() - 2 * inner.diagonal().sum() + (inner * (own.T @ own)).sum())
        a = one.rest * (1 - mix) / trace if trace > 0 else 0.0
        b = one.rest * (mix if trace > 0 else 1.0) / (M - r) if r < M else 0.0
        left.append(a * (part - own @ (inner / 2)) + b / 2 * own)
        first, second = first + a, second + b
    taken = torch.cat(left, dim=1) @ V.T
    G.add_((taken + taken.T).neg_().add_(Q, alpha=first))
    G.diagonal().add_(second)


def leading_directions(G: Tensor, q: int) -> Tensor:
    """About the q leading eigenvectors of a positive semidefinite G, by subspace iteration."""
    X = torch.randn(len(G), min(q, len(G)), generator=torch.Generator().manual_seed(0), dtype=G.dtype)
    for _ in range(5):
        X = torch.linalg.qr(G @ X)[0]
    return X @ torch.linalg.eigh(X.T @ G @ X)[1].flip(1)


class Server:
    """One variant: what its clients send, and what its server makes of it.

    Attributes:
        variant: what is tried.
        G, B: the statistics.
        up, down: most bytes of one client in one task.
    """

    def __init__(self, variant: Variant, P: Tensor, remainder: torch.dtype) -> None:
        self.variant, self.P, self.P_remainder = variant, P, P.to(remainder)
        d, M = P.shape
        self.G, self.B, self.W = P.new_zeros(M, M), P.new_zeros(M, 0), P.new_zeros(M, 0)
        self.within = P.new_zeros(M, M) if variant.subspace else self.G
        self.Sigma, self.samples = P.new_zeros(d, d), 0.0
        self.up = self.down = 0
        self.ridge = 0.0

    def learn(self, clients: Sequence[Local], shared: dict[tuple, Any]) -> None:
        """One task; `shared` keeps what variants with the same Sigma have in common."""
        v = self.variant
        basis = self.broadcast(clients[0])
        total = [sum(getattr(one, name) for one in clients) for name in ("S", "S_z", "n")]
        if v.centre == "global" or v.linear:
            clients = [one.centred(*total) for one in clients]
            if v.centre == "global":
                self.down += sums_bytes(len(total[0]) + len(total[1]), len(total[2]), 16)
        if v.clusters > 1:
            clients = [one.clustered() for one in clients]
        if v.linear:
            clients = [added_up(clients, total, v.linear, v.linear_inputs or v.linear)]
        ranks = ranks_of(v, clients)
        sent = [self.sent(one, rank, basis) for one, rank in zip(clients, ranks, strict=True)]
        S, n = sum(one.S for one in sent), sum(one.n for one in sent)
        self.B = torch.cat([self.B, S], dim=1)
        self.samples += float(n.sum())
        for one in sent:
            self.Sigma += one.sigma
            self.up = max(self.up, one.up)
        if v.centre == "global" or v.linear:
            add_gram(self.G, (S / n.sqrt()).T[n > 0])
        else:
            add_gram(self.G, torch.cat([(one.S / one.n.sqrt()).T[one.n > 0] for one in sent]))
        if v.remainder == "exact":
            for one in clients:
                add_gram(self.G, one.hidden.A)
        elif v.difference:
            for one, local in zip(sent, clients, strict=True):
                self.add_difference(one, local)
        else:
            added = self.G if not v.subspace else torch.zeros_like(self.G)
            add_gram(added, torch.cat([one.factor for one in sent], dim=1).T.contiguous())
            self.add_dropped(added, sent, clients, shared)
            if v.subspace:
                self.within += added
                self.G += added
        self.solve()

    def broadcast(self, one: Local) -> Tensor | None:
        """The server's leading directions (M, q), and how many bytes that takes."""
        q, M = self.variant.subspace, len(self.G)
        self.down = 8 + 4 * len(one.n)
        if not q or not self.samples:
            return None
        self.down += factor_bytes(M, q, 8)
        return rounded(leading_directions(self.within, q), 8)

    def sent(self, one: Local, rank: int, basis: Tensor | None) -> Sent:
        """What the client sends, rounded and counted."""
        v, (M, c) = self.variant, one.S.shape
        if v.remainder == "exact":
            return self.whole(one)
        sigma, S_z, means, up = self.of_inputs(one)
        V, values = one.hidden.top
        V, values = rounded(V[:, :rank], v.bits, v.fine), values[:rank]
        factor = V * values
        up += factor_bytes(M, V.shape[1], v.bits, v.fine) + sums_bytes(M, c, v.sums_bits) + 4 * c + 4
        if v.own_basis:
            C = Covariance(sigma / one.n.sum(), self.P_remainder)
            Q = modelled(self.P_remainder, C, means, one.sizes, one.group, v.order)
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
            s = ((sigma @ self.P) * self.P).sum(0).clamp_min(1e-30).div(one.n.sum()).sqrt()
            guess = rectified(self.P.T @ means, s)[3] * one.n
            S = guess + rounded_sums(S - guess, v.sums_bits)
        else:
            S = rounded_sums(S, v.sums_bits)
        return Sent(V, factor, rest, S, S_z, one.n, sigma, means, one.sizes, one.group, self.secure(one, up))

    def of_inputs(self, one: Local) -> tuple[Tensor, Tensor, Tensor, int]:
        """The scatter (d, d), class sums and means of the backbone's features, and the bytes that tell them."""
        v, c, d = self.variant, len(one.n), len(one.S_z)
        if v.remainder == "isotropic":
            return self.Sigma.new_zeros(d, d), one.S_z, one.means, 0
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

    def secure(self, one: Local, up: int) -> int:
        """Bytes of the upload; if it only adds up, numbers of 32 bits for modular sums."""
        v, (M, c), d = self.variant, one.S.shape, len(one.S_z)
        s = v.linear_inputs or v.linear
        inputs = d * (d + 1) // 2 if s >= d else d * s
        return 4 * (M * v.linear + inputs + (M + d + 1) * c + 2) if v.linear else up

    def whole(self, one: Local) -> Sent:
        """The Gram matrix itself, its upper triangle in float32."""
        M, c = one.S.shape
        nothing = one.S.new_zeros(M, 0)
        up, flat = 4 * (M * (M + 1) // 2 + M * c), torch.zeros_like(self.Sigma)
        return Sent(nothing, nothing, 0.0, one.S, one.S_z, one.n, flat, one.means, one.sizes, one.group, up)

    def add_dropped(self, G: Tensor, sent: Sequence[Sent], clients: Sequence[Local], shared: dict[tuple, Any]) -> None:
        """G += what the sketches drop."""
        v, M = self.variant, len(G)
        mixes = [v.mix_samples / (v.mix_samples + one.samples) if v.mix_samples else v.mix for one in sent]
        before = G.clone() if v.diagonal == "hidden" else G
        if v.remainder == "isotropic":
            V = torch.cat([one.V * (one.rest / (M - one.V.shape[1])) ** 0.5 for one in sent], dim=1)
            add_gram(G, V.T.contiguous(), -1).diagonal().add_(sum(one.rest / (M - one.V.shape[1]) for one in sent))
        elif v.own_counts:
            means = sum(one.S_z for one in sent) / sum(one.n for one in sent).clamp_min(1)
            for one, mix in zip(sent, mixes, strict=True):
                C = self.covariance(shared)
                if v.own_sigma:
                    own, all_ = one.sigma / one.samples, self.Sigma / self.samples
                    C = Covariance(v.own_sigma * own + (1 - v.own_sigma) * all_, self.P_remainder)
                Q = modelled(self.P_remainder, C, means, one.n, torch.arange(len(one.n)), v.order)
                add_remainders(G, Q, [one], [mix])
        else:
            key = ("Q", v.own_means, v.order, *self.key)
            if v.own_means or v.clusters > 1:
                c = len(sent[0].n)
                means, sizes = (torch.cat([getattr(one, name) for one in sent], -1) for name in ("means", "sizes"))
                group = torch.cat([one.group + c * number for number, one in enumerate(sent)])
            else:
                sizes = sum(one.n for one in sent)
                means, group = sum(one.S_z for one in sent) / sizes.clamp_min(1), torch.arange(len(sizes))
            if key not in shared:
                shared[key] = modelled(self.P_remainder, self.covariance(shared), means, sizes, group, v.order)
            add_remainders(G, shared[key], sent, mixes)
        if v.diagonal == "hidden":
            added = G - before
            exact = sum(one.hidden.A.square().sum(0) for one in clients)
            exact = (exact - sum(one.factor.square().sum(1) for one in sent)).clamp_min(0)
            if v.remainder == "isotropic":
                G.copy_(before).diagonal().add_(exact)
            else:
                ratio = (exact / added.diagonal().clamp_min(1e-300)).sqrt()
                G.copy_(before.addcmul_(added.mul_(ratio), ratio[:, None]))

    @property
    def key(self) -> tuple:
        """What Sigma and the means of the backbone's features depend on."""
        v = self.variant
        return (v.input_rank, v.bits, v.diagonal == "input", v.centre, v.clusters, v.linear)

    def covariance(self, shared: dict[tuple, Any]) -> Covariance:
        """Of the hidden units under the pooled Sigma."""
        if self.key not in shared:
            shared[self.key] = Covariance(self.Sigma / self.samples, self.P_remainder)
        return shared[self.key]

    def add_difference(self, one: Sent, local: Local) -> None:
        """G += model + V diag(l) V', V the directions in which A'A differs most from the client's model of it."""
        v, M = self.variant, len(self.G)
        C = Covariance(one.sigma / one.samples, self.P_remainder)
        model = modelled(self.P_remainder, C, one.means, one.sizes, one.group, v.order)
        model *= (1 - v.mix) * local.hidden.energy / float(model.trace())
        model.diagonal().add_(v.mix * local.hidden.energy / M)
        A, rng = local.hidden.A.to(model), torch.Generator().manual_seed(0)
        X = torch.randn(M, min(M, v.rank + 16), generator=rng, dtype=model.dtype)
        for _ in range(6):
            X = torch.linalg.qr(A.T @ (A @ X) - model @ X)[0]
        values, turn = torch.linalg.eigh((gram(A @ X) - X.T @ model @ X).double())
        X = X.double()
        first = values.abs().argsort(descending=True)[: v.rank]
        V = rounded(X @ turn[:, first], v.bits)
        self.G += model
        self.G += (V * values[first]) @ V.T

    def solve(self) -> None:
        v, M = self.variant, len(self.G)
        if v.ridge == GCV:
            values, vectors = torch.linalg.eigh(self.G)
            spectrum = Eigenvalues(values.clamp_min(0), (vectors.T @ self.B).square().sum(1), torch.ones_like(values))
            self.ridge = gcv(spectrum, round(self.samples)) or mean_share(float(values.sum()), M)
        else:
            share = v.share / SHARE * mean_share(float(self.G.trace()), M)
            kept = self.ridge or share
            self.ridge = share if v.ridge == AUTO else kept if v.ridge == FIRST else float(v.ridge)
        A = self.G.clone()
        A.diagonal().add_(self.ridge)
        factor, failed = torch.linalg.cholesky_ex(A)
        # The usual way out of a system that is singular to rounding costs ten times as much.
        self.W = solve_symmetric(A, self.B).W if bool(failed) else torch.cholesky_solve(self.B, factor)


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


def added_up(clients: Sequence[Local], total: Sequence[Tensor], s: int, s_inputs: int) -> Local:
    """What a server knows that sees sums over clients alone: A'A Omega for a shared random Omega, traces, class sums.

    A is centred by the sum's own class means, since H'H Omega is a sum and so is what the means take out of it. The
    sketch is Nystroem's, A'A Omega (Omega' A'A Omega)^-1 Omega' A'A.
    """

    def sketched(parts: Sequence[Deviations], s: int) -> Deviations:
        width = parts[0].A.shape[1]
        rng = torch.Generator().manual_seed(1)
        Omega = torch.randn(width, min(s, width), generator=rng, dtype=parts[0].A.dtype)
        Y = sum(part.A.T @ (part.A @ Omega) for part in parts)
        values, turn = torch.linalg.eigh(Omega.T @ Y)
        kept = values > values[-1] * 1e-12
        V, sigma, _ = torch.linalg.svd(Y @ (turn[:, kept] / values[kept].sqrt()), full_matrices=False)
        merged = Deviations(torch.cat([part.A for part in parts]), s)
        merged.top = Spectrum(V, sigma)
        return merged

    S, S_z, n = total
    hidden, inputs = sketched([one.hidden for one in clients], s), sketched([one.inputs for one in clients], s_inputs)
    means = S_z / n.clamp_min(1)
    return Local(torch.cat([one.which for one in clients]), n, S, S_z, hidden, inputs, means, n, torch.arange(len(n)))


def accuracies(W: Tensor, B: Tensor, H: Tensor, labels: Tensor) -> tuple[float, float]:
    """Percent right, plainly and with each class's scores divided by sqrt(B_c'w_c)."""
    scores = H @ W.to(H)
    right = [x.argmax(1) == labels for x in (scores, scores * score_scales((B * W).sum(0)).to(H))]
    return 100 * float(right[0].double().mean()), 100 * float(right[1].double().mean())


@dataclass
class Stream:
    """The tasks of one seed: training samples per task and client, test samples per task."""

    Z: Tensor
    labels: Tensor
    Z_test: Tensor
    test_labels: Tensor
    tasks: list[tuple[tuple[int, ...], Holdings, np.ndarray]]

    @classmethod
    def of(cls, data: Dataset, tasks: int, clients: int, beta: float, seed: int) -> Stream:
        """As a run with the same seed deals it."""
        stream, partition = ClassIncremental().cut(data, tasks, seed), Dirichlet(beta=beta)
        dealt = []
        for t, (task, train, test) in enumerate(zip(stream.tasks, stream.train, stream.test, strict=True)):
            parts = partition.deal(stream.train_columns[train], clients, generator(seed, "partition", t))
            dealt.append((task.columns, Holdings.of(train[part] for part in parts), test))
        inputs = [torch.from_numpy(np.asarray(side.inputs)).double() for side in (data.train, data.test)]
        columns = [torch.from_numpy(side) for side in (stream.train_columns, stream.test_columns)]
        return cls(inputs[0], columns[0], inputs[1], columns[1], dealt)


@dataclass
class Result:
    """Per variant: `A` (T, 2) accuracies after each task, plain and scaled; bytes; seconds of all."""

    A: list[tuple[float, float]] = field(default_factory=list)
    up: int = 0
    down: int = 0


def experiment(
    stream: Stream,
    chosen: Sequence[Variant],
    M: int,
    seed: int,
    seen: Callable[[int, list[Local]], None] | None = None,
    remainder: torch.dtype = torch.float32,
) -> tuple[dict[str, Result], dict[str, Server]]:
    """One pass over tasks and clients for all variants; `seen` is shown what the clients have.

    Statistics and solves are in float64; the remainder, which is a model in any case, is computed in `remainder`.
    """
    projection, d = derived_seed(seed, "projection"), stream.Z.shape[1]
    features = RandomFeatures(projection, d, M, torch.float64, torch.device("cpu"))
    assert features.projection is not None
    servers = {v.name: Server(v, features.projection, remainder) for v in chosen}
    results = {v.name: Result() for v in chosen}
    uneven = any(v.ranks in ("total", "relative") for v in chosen)
    most = max(max(v.rank for v in chosen), MOST * chosen[0].rank if uneven else 0)
    most_inputs = max((v.input_rank for v in chosen if not v.linear), default=1)
    H_test, tested = features.map(stream.Z_test).float(), np.zeros(0, dtype=np.int64)
    for t, (columns, holdings, test) in enumerate(stream.tasks):
        clients = []
        for part in holdings:
            if len(part):
                Z, which = stream.Z[part], torch.searchsorted(torch.tensor(columns), stream.labels[part])
                clients.append(Local.of(Z, features.map(Z), which, len(columns), most, most_inputs))
        if seen is not None:
            seen(t, clients)
        tested, shared = np.concatenate([tested, test]), {}
        H, labels = H_test[torch.from_numpy(tested)], stream.test_labels[torch.from_numpy(tested)]
        for name, server in servers.items():
            server.learn(clients, shared)
            result = results[name]
            result.A.append(accuracies(server.W, server.B, H, labels))
            result.up, result.down = max(result.up, server.up), max(result.down, server.down)
        print(f"seed {seed}, task {t}", file=sys.stderr, flush=True)
    return results, servers


class Coding:
    """How far lossless coders shrink the 8-bit factors of some uploads."""

    def __init__(self, rank: int, tasks: Sequence[int] = (0, 4, 9)) -> None:
        self.rank, self.tasks = rank, tasks
        self.size, self.coded, self.bits = 0, {}, {"entropy per column": 0.0, "entropy, sigma known per row": 0.0}

    def __call__(self, task: int, clients: list[Local]) -> None:
        for one in clients if task in self.tasks else []:
            V = one.hidden.top.V[:, : self.rank]
            scale = V.abs().amax(0) / 127
            q = (V / scale).round().to(torch.int8).numpy()
            steps = np.diff(q.astype(np.int16), axis=0, prepend=0).astype(np.uint8)  # modulo 256: it can be undone
            forms = {"columns": q.T, "rows": q, "differences": steps.T, "sorted by row size": sorted_(q)}
            self.size += q.size
            for form, array in forms.items():
                raw = np.ascontiguousarray(array).tobytes()
                for name, coder in coders().items():
                    key = f"{name}, {form}"
                    self.coded[key] = self.coded.get(key, 0) + len(coder(raw))
            row = torch.linalg.vector_norm(V / scale, dim=1) / math.sqrt(V.shape[1])
            for column in q.T:
                share = np.bincount(column.astype(np.int16) + 128, minlength=256) / len(column)
                share = share[share > 0]
                self.bits["entropy per column"] -= len(column) * float(share @ np.log2(share))
            edges = torch.from_numpy(q.astype(np.float64))
            width = row.clamp_min(1e-9)[:, None]
            mass = torch.special.ndtr((edges + 0.5) / width) - torch.special.ndtr((edges - 0.5) / width)
            self.bits["entropy, sigma known per row"] -= float(mass.clamp_min(1e-30).log2().sum())

    def rows(self) -> list[tuple[str, float]]:
        """Coded over raw bytes, best first."""
        found = {**self.coded, **{name: bits / 8 for name, bits in self.bits.items()}}
        return sorted(((name, size / self.size) for name, size in found.items()), key=lambda pair: pair[1])


def sorted_(q: np.ndarray) -> np.ndarray:
    """Columns, the rows in the order of their size, which costs bytes of its own unless the server knows it."""
    return q[np.argsort(np.abs(q.astype(np.int16)).sum(1))].T


def coders() -> dict[str, Callable[[bytes], bytes]]:
    """Those of the standard library, and of zstandard and brotli where they are installed."""
    found: dict[str, Callable[[bytes], bytes]] = {
        "zlib": lambda raw: zlib.compress(raw, 9),
        "bz2": lambda raw: bz2.compress(raw, 9),
        "lzma": lambda raw: lzma.compress(raw, preset=9),
    }
    for name in ("zstandard", "brotli"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        found[name] = module.ZstdCompressor(level=19).compress if name == "zstandard" else module.compress
    return found


def markdown(results: Sequence[dict[str, Result]]) -> str:
    """The table: one row per variant, mean and sample standard deviation over seeds."""
    names = ("variant", "up (kB)", "down (kB)", "A_avg", "A_T", "scaled A_avg", "scaled A_T")
    lines = [f"| {' | '.join(names)} |", "| --- " + "| ---: " * (len(names) - 1) + "|"]
    for name in results[0]:
        of_seed = [one[name] for one in results]
        A = np.array([result.A for result in of_seed])
        cells = []
        for scaled in (0, 1):
            for values in (A[:, :, scaled].mean(1), A[:, -1, scaled]):
                spread = f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else ""
                cells.append(f"{values.mean():.2f}{spread}")
        up, down = (max(getattr(result, what) for result in of_seed) / 1000 for what in ("up", "down"))
        lines.append(f"| {name} | {up:.1f} | {down:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=Path, required=True, help=".npz with x_train, y_train, x_test, y_test")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--M", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=32, help="r of the base")
    parser.add_argument("--input-rank", type=int, default=32, help="k of the base")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", help="names of variants, or beginnings of them")
    parser.add_argument("--without", nargs="+", default=[], help="variants that are left out, likewise")
    parser.add_argument("--coding", action="store_true", help="how far lossless coders shrink the first seed's factors")
    parser.add_argument("--out", type=Path, help="JSON to be written")
    options = parser.parse_args(arguments)
    chosen = variants(options.rank, options.input_rank)
    if options.only:
        chosen = [v for v in chosen if v.name.startswith(tuple(options.only))]
    chosen = [v for v in chosen if not v.name.startswith(tuple(options.without))]
    if not chosen:
        parser.error("no variant is left; there are " + "; ".join(v.name for v in variants()))
    data, coding, results = FeatureFile(path=str(options.features)).load(), Coding(options.rank), []
    for number, seed in enumerate(options.seeds):
        begin = time.perf_counter()
        stream = Stream.of(data, options.tasks, options.clients, options.beta, seed)
        shown = coding if options.coding and number == 0 else None
        results.append(experiment(stream, chosen, options.M, seed, shown)[0])
        print(f"seed {seed}: {time.perf_counter() - begin:.0f} s", flush=True)
        if options.out:
            found = [{name: vars(result) for name, result in one.items()} for one in results]
            told = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
            written = {"options": told, "coding": coding.rows() if options.coding else [], "results": found}
            options.out.write_text(json.dumps(written) + "\n")
    print(f"\nK {options.clients}, beta {options.beta:g}, M {options.M}, T {options.tasks}, seeds {options.seeds}\n")
    print(markdown(results))
    if options.coding:
        print("\n| coder | coded / raw |\n| --- | ---: |")
        print("\n".join(f"| {name} | {share:.3f} |" for name, share in coding.rows()))


if __name__ == "__main__":
    main()
