"""AFL's server over all clients beside its unavoidable work done bare, and beside pairwise aggregation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.protocol.message import Message
from suite import made, peers
from suite.lines import PAIRWISE
from suite.sides import Beside, Work, limit, ours, peer, sizes

#: Different uploads, over and over: 1,000 would be 2 GiB; these are more than a cache holds.
DIFFERENT = 128
#: Clients of which the pairwise updates of all are estimated.
CLIENTS = 20


@sizes(
    smoke=[{"K": 10, "d": 16, "C": 4, "dtype": "float64"}],
    quick=[{"K": 100, "d": 512, "C": 10, "dtype": dtype} for dtype in ("float32", "float64")],
    full=[{"K": 1000, "d": 512, "C": C, "dtype": "float64"} for C in (10, 100)],
)
def bench_afl_server(case, beside: Beside, device, full_peers: bool) -> None:
    known = made.context(case.d, case.dtype, device)
    method, task = AFL(), made.task(case.C)
    shards = [
        made.client_data(50, case.d, case.C, case.dtype, device, client) for client in range(min(DIFFERENT, case.K))
    ]
    uploads = made.uploads(method, known, shards, task)
    some = case.K if full_peers else min(CLIENTS, case.K)

    def arriving(count: int) -> Iterator[Message]:
        return (uploads[client % len(uploads)] for client in range(count))

    def prepare() -> Work:
        server = method.server(known)
        server.start_task(task)

        def work() -> None:
            for client, message in enumerate(arriving(case.K)):
                server.absorb(client, message)
            server.finish_round()
            server.finish_task()

        return work

    def prepare_bare() -> Work:
        G = torch.zeros(case.d, case.d, dtype=case.dtype, device=device)
        definite = uploads[0]["C"].double()

        def work() -> None:
            products = None
            for message in arriving(case.K):
                G.add_(message["C"])
                products = message["C"] @ message["W"]
            torch.cholesky_solve(products.double(), torch.linalg.cholesky(definite))

        return work

    inverses = [torch.linalg.inv(one["C"]) for one in uploads]

    def pairwise() -> None:
        which = (client % len(uploads) for client in range(some))
        peers.weighted((uploads[one]["C"], inverses[one], uploads[one]["W"]) for one in which)

    def one_inverse() -> None:
        peers.aggregated(((one["C"], one["W"]) for one in arriving(some)), method.gamma, last=False)

    beside(
        ours("absorb, finish_task", prepare),
        limit("additions, products, Cholesky", prepare_bare),
        # The first client needs no aggregation.
        peer(PAIRWISE, lambda: pairwise, share=(some - 1) / (case.K - 1)),
        peer("one inverse for every client", lambda: one_inverse, share=(some - 1) / (case.K - 1)),
    )
