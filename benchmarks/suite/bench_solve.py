"""The solver, which also tells how far its solution can be trusted, beside a bare Cholesky solve."""

from __future__ import annotations

from functools import partial

import torch

from fcl_bench.linalg.solve import relative_rounding, solve_symmetric
from fcl_bench.methods.closed_form.ridge import Estimate
from suite import made, peers
from suite.sides import Beside, Work, each, limit, ours, peer, sizes

#: Of the made-up Gram matrices, whose largest eigenvalue is some 10^6.
RIDGE = 100.0


def cholesky(A: torch.Tensor, B: torch.Tensor) -> Work:
    """Factorisation and solve, nothing else."""
    return lambda: torch.cholesky_solve(B, torch.linalg.cholesky(A))


@sizes(
    smoke=[{"M": 64, "C": 10}],
    quick=[{"M": 512, "C": 100}, {"M": 2048, "C": 100}],
    full=[{"M": 5000, "C": 100}, {"M": 2048, "C": 1000}],
)
def bench_solve(case, beside: Beside, device) -> None:
    H = made.random_features(2 * case.M, 64, case.M, torch.float64, device)
    G, B = H.T @ H, H.T @ torch.nn.functional.one_hot(made.labels(len(H), case.C, device), case.C).double()
    A, rounding = peers.shifted(G, RIDGE), relative_rounding(torch.float32)
    beside(
        ours("solve_symmetric", each(partial(solve_symmetric, G, B, rounding, shift=RIDGE))),
        limit("Cholesky", each(cholesky(A, B))),
        peer("inverse", each(lambda: peers.inverse_ridge(G, B, RIDGE))),
    )


@sizes(
    smoke=[{"M": 64, "m": 10, "C": 5}],
    quick=[{"M": 2048, "m": 500, "C": 100}],
    full=[{"M": 5000, "m": 1500, "C": 100}],
)
def bench_low_rank_solve(case, beside: Beside, device) -> None:
    """The centred sketch's, in the span of the factors that it keeps."""
    F = made.random_features(case.m, 64, case.M, torch.float64, device).T.contiguous()
    B = F @ torch.nn.functional.one_hot(made.labels(case.m, case.C, device), case.C).double()

    def prepare() -> Work:
        total = Estimate(case.M, torch.float64, device, low_rank=True)
        total.add_factor(F)
        return partial(total.solve, B, RIDGE, relative_rounding(torch.float64))

    both, inner = torch.cat([F, B], dim=1), torch.eye(case.m + case.C, dtype=torch.float64, device=device)

    def bare() -> None:
        torch.linalg.qr(both)
        torch.linalg.cholesky(inner)

    beside(
        ours("Estimate.solve", prepare),
        limit("QR and inner Cholesky", each(bare)),
        peer("inverse", each(lambda: peers.inverse_ridge(F @ F.T, B, RIDGE))),
    )
