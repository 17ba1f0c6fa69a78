"""STSA-E's server in a task beside the Gram product of all groups and a Cholesky solve, and beside rank-one updates."""

from __future__ import annotations

from functools import partial

import torch

from fcl_bench.methods.closed_form.stsa_e import STSAE
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Server
from suite import made, peers
from suite.sides import Beside, each, limit, ours, peer, sizes

#: Rank-one updates of which the time of all is estimated, above so many numbers in a matrix.
UPDATES, LARGE = 25, 4_000_000


@sizes(
    smoke=[{"M": 64, "K": 2, "K_D": 5, "C": 4, "dtype": "float64"}],
    quick=[{"M": 1250, "K": 5, "K_D": 10, "C": 10, "dtype": "float64"}],
    full=[{"M": 5000, "K": 25, "K_D": 10, "C": 10, "dtype": "float64"}],
)
def bench_stsa_e_server(case, beside: Beside, device, full_peers: bool) -> None:
    known = made.context(64, case.dtype, device)
    method = STSAE(M=case.M, dummy_clients=case.K_D)
    task = made.task(case.C)
    shards = [made.client_data(20 * case.K_D, 64, case.C, case.dtype, device, client) for client in range(case.K)]
    uploads = made.uploads(method, known, shards, task)
    C, n = joined(uploads)
    groups = n.shape[0]
    updates = groups * case.C
    some = None if full_peers or case.M**2 < LARGE else min(UPDATES, updates)
    columns, A, B = C.reshape(case.M, -1), peers.shifted(peers.scatter(C[:, :2], n[:2]), method.gamma), C.sum(dim=1)

    def bare() -> None:
        columns @ columns.T
        torch.cholesky_solve(B.double(), torch.linalg.cholesky(A.double()))

    beside(
        ours("absorb, finish_task", lambda: partial(one_task, method.server(known), uploads, case.C)),
        limit("product and Cholesky", each(bare)),
        # Its own solve is left out, in its favour.
        peer("rank-one updates", each(lambda: peers.scatter(C, n, some)), share=(some or updates) / updates),
    )


def one_task(server: Server, uploads: list[Message], classes: int) -> None:
    """All that the server does in a task."""
    server.start_task(made.task(classes))
    for client, message in enumerate(uploads):
        server.absorb(client, message)
    server.finish_round()
    server.finish_task()


def joined(uploads: list[Message]) -> tuple[torch.Tensor, torch.Tensor]:
    """C (M, groups, c) and n (groups, c) of all uploads."""
    sums = [message["C"].reshape(len(message["C"]), *message["n"].shape) for message in uploads]
    return torch.cat(sums, dim=1), torch.cat([message["n"] for message in uploads])
