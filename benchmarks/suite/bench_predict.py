"""Class scores of test samples beside the two bare products."""

from __future__ import annotations

from functools import partial

import torch

from fcl_bench.methods.closed_form.stsa import STSA
from suite import made, peers
from suite.sides import Beside, each, limit, ours, peer, sizes


@sizes(
    smoke=[{"n": 50, "d": 16, "M": 64, "C": 10, "dtype": "float64"}],
    quick=[{"n": 2000, "d": 512, "M": 2048, "C": 100, "dtype": dtype} for dtype in ("float32", "float64")],
    full=[
        {"n": 10000, "d": 512, "M": 5000, "C": 100, "dtype": "float64"},
        {"n": 10000, "d": 512, "M": 1250, "C": 1000, "dtype": "float64"},
    ],
)
def bench_predict(case, beside: Beside, device) -> None:
    known = made.context(case.d, case.dtype, device)
    server = STSA(M=case.M).server(known)
    # A classifier of these sizes; what it says does not matter here.
    server.W = torch.randn(case.M, case.C, dtype=case.dtype, device=device)
    P = server.model()["projection"]
    Z = made.features(case.n, case.d, 10, case.dtype, device)
    flops = 2 * case.n * case.M * (case.d + case.C)
    beside(
        ours("predict", each(partial(server.predict, Z)), flops),
        limit("Z P and H W", each(lambda: (Z @ P) @ server.W), flops),
        peer(f"batches of {peers.BATCH}", each(lambda: peers.predict(Z, P, server.W))),
    )
