"""STSA's client, Z P included, beside the bare product H'H."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch

from fcl_bench.methods.closed_form.stsa import STSA
from suite import made, peers
from suite.sides import Beside, Side, each, limit, ours, peer, sizes


@sizes(
    smoke=[{"n": 50, "d": 16, "M": 64, "C": 5, "dtype": "float64"}],
    quick=[{"n": 2000, "d": 512, "M": 2048, "C": 10, "dtype": dtype} for dtype in ("float32", "float64")],
    full=[
        *({"n": 10000, "d": 512, "M": 5000, "C": 10, "dtype": dtype} for dtype in ("float32", "float64")),
        {"n": 1000, "d": 512, "M": 5000, "C": 100, "dtype": "float64"},
    ],
)
def bench_statistics(case, beside: Beside, device) -> None:
    beside(*sides_of(case, device))


def sides_of(case: SimpleNamespace, device: torch.device) -> tuple[Side, Side, Side]:
    """Ours, the limit and the peer."""
    known = made.context(case.d, case.dtype, device)
    method = STSA(M=case.M)
    client, server, task = method.client(known), method.server(known), made.task(case.C)
    server.start_task(task)
    broadcast = server.broadcast(task, 0)
    client_data = made.client_data(case.n, case.d, case.C, case.dtype, device)
    P = made.context_projection(known, case.M)
    H = peers.random_features(client_data.inputs, P)
    product = 2 * case.n * case.M**2
    # Z P, H'H, and an addition for every entry of H.
    flops = 2 * case.n * case.d * case.M + product + case.n * case.M
    return (
        ours("STSAClient.update", each(partial(client.update, client_data, broadcast, {})), flops),
        limit("H'H", each(lambda: H.T @ H), product),
        peer("class sums by sample", each(lambda: peers.statistics(client_data.inputs, client_data.labels, P, case.C))),
    )
