"""A variant's server: its statistics, its broadcast, its classifier."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fcl_bench.linalg.gram import add_gram
from fcl_bench.linalg.solve import solve_symmetric
from fcl_bench.methods.closed_form.algebra.ridge import AUTO, GCV, SHARE, gcv, mean_share
from fcl_bench.methods.closed_form.algebra.ridge import Spectrum as Eigenvalues
from sketches.local import Local
from sketches.remainders import add_difference, add_dropped
from sketches.rounding import factor_bytes, rounded, sums_bytes
from sketches.sums import added_up
from sketches.uploads import Uploads, leading_directions, ranks_of
from sketches.variants import FIRST, Variant

Tensor = torch.Tensor


class Server:
    """What one variant's server makes of the uploads.

    Attributes:
        variant: what is tried.
        G, B: the statistics.
        up, down: most bytes of one client in one task.
    """

    def __init__(self, variant: Variant, P: Tensor, remainder: torch.dtype) -> None:
        self.variant, self.P_remainder = variant, P.to(remainder)
        self.uploads = Uploads(variant, P, self.P_remainder)
        d, M = P.shape
        self.G, self.B, self.W = P.new_zeros(M, M), P.new_zeros(M, 0), P.new_zeros(M, 0)
        self.within = P.new_zeros(M, M) if variant.subspace else self.G
        self.Sigma, self.samples = P.new_zeros(d, d), 0.0
        self.up = self.down = 0
        self.ridge = 0.0

    def learn(self, clients: Sequence[Local], shared: dict[tuple, Tensor]) -> None:
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
        sent = [self.uploads.of(one, rank, basis) for one, rank in zip(clients, ranks, strict=True)]
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
                add_difference(self.G, v, self.P_remainder, one, local)
        else:
            added = self.G if not v.subspace else torch.zeros_like(self.G)
            add_gram(added, torch.cat([one.factor for one in sent], dim=1).T.contiguous())
            add_dropped(added, v, self.P_remainder, self.Sigma / self.samples, sent, clients, shared)
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
