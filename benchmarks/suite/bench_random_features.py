"""H = ReLU(Z P) beside the product Z P, and drawing P beside drawing as many numbers."""

from __future__ import annotations

import torch

from fcl_bench.methods.closed_form.algebra.random_features import RandomFeatures
from suite import made, peers
from suite.sides import Beside, each, limit, ours, peer, sizes


@sizes(
    smoke=[{"n": 50, "d": 16, "M": 64, "dtype": "float64"}],
    quick=[{"n": 2000, "d": 512, "M": 2048, "dtype": dtype} for dtype in ("float32", "float64")],
    full=[
        {"n": 10000, "d": 512, "M": 5000, "dtype": "float64"},
        {"n": 2000, "d": 768, "M": 8192, "dtype": "float64"},
    ],
)
def bench_random_features(case, beside: Beside, device) -> None:
    Z = made.features(case.n, case.d, 10, case.dtype, device)
    shared = RandomFeatures(0, case.d, case.M, case.dtype, device)
    P = shared.projection
    assert P is not None
    flops = 2 * case.n * case.d * case.M
    beside(
        ours("RandomFeatures.map", each(lambda: shared.map(Z)), flops),
        limit("Z P", each(lambda: Z @ P), flops),
        peer("product, then ReLU", each(lambda: peers.random_features(Z, P))),
    )


@sizes(
    smoke=[{"d": 16, "M": 64}],
    quick=[{"d": 512, "M": 2048}],
    full=[{"d": 512, "M": 16384}],
)
def bench_projection(case, beside: Beside, device) -> None:
    beside(
        ours("RandomFeatures", each(lambda: RandomFeatures(0, case.d, case.M, torch.float64, device))),
        limit("randn", each(lambda: torch.randn(case.d, case.M, dtype=torch.float64))),
    )
