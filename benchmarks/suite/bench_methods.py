"""A task of every closed-form method, clients and server, beside the products and factorisations that it consists of.

The wire is between them as in a run; reading, dealing and testing are not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch

from fcl_bench.engine.codec import decoded, encoded
from fcl_bench.methods.closed_form.afcl import AFCL
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.centralised_ridge import CentralisedRidge
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.methods.closed_form.stsa_e import STSAE
from fcl_bench.protocol.context import ClientData, Context
from fcl_bench.protocol.method import Method, Server
from suite import made, peers
from suite.sides import Beside, Side, Work, each, limit, ours, peer, sizes

#: By `method`, at the sizes of a case.
METHODS: dict[str, Callable[[SimpleNamespace], Method]] = {
    "stsa": lambda case: STSA(M=case.M),
    "stsa_e": lambda case: STSAE(M=case.M),
    "afl": lambda case: AFL(),
    "afcl": lambda case: AFCL(),
    "fedran": lambda case: FedRAN(M=case.M, rank=case.r),
    "centred_sketch": lambda case: CentredSketch(M=case.M, rank=case.r),
    "centralised_ridge": lambda case: CentralisedRidge(M=case.M),
}
#: Which of `bare`'s parts a method can't do without.
PARTS: dict[str, tuple[str, ...]] = {
    "stsa": ("features", "grams", "solve"),
    "stsa_e": ("features", "groups", "solve"),
    "afl": ("inputs", "local solves", "input solve"),
    "afcl": ("inputs", "local solves", "input solve"),
    "fedran": ("features", "summaries", "merges"),
    "centred_sketch": ("features", "summaries", "solve"),
    "centralised_ridge": ("features", "grams", "solve"),
}


@sizes(
    smoke=[{"method": name, "n": 30, "d": 16, "M": 48, "r": 8, "K": 2, "C": 4} for name in METHODS],
    quick=[{"method": name, "n": 200, "d": 256, "M": 1024, "r": 128, "K": 5, "C": 10} for name in METHODS],
    full=[{"method": name, "n": 1000, "d": 512, "M": 2048, "r": 512, "K": 5, "C": 10} for name in METHODS],
)
def bench_method(case, beside: Beside, device) -> None:
    """n: samples of each client."""
    known = made.context(case.d, torch.float64, device)
    method = METHODS[case.method](case)
    shards = [made.client_data(case.n, case.d, case.C, torch.float64, device, client) for client in range(case.K)]
    plain = plain_task(case, shards, known)
    beside(
        ours("a task", each(partial(learned, method, known, shards, case.C))),
        limit(", ".join(PARTS[case.method]), each(bare(case, device))),
        *([] if plain is None else [plain]),
    )


def learned(method: Method, known: Context, shards: list[ClientData], classes: int) -> Server:
    """The server after one task, all rounds, over the wire."""
    client, server, task = method.client(known), method.server(known), made.task(classes)
    server.start_task(task)
    for round_ in range(server.rounds(task)):
        broadcast = server.broadcast(task, round_)
        for number, client_data in enumerate(shards):
            message = encoded(made.upload(client, client_data, broadcast), known.wire)
            server.absorb(number, decoded(message, known.dtype, known.device))
        server.finish_round()
    server.finish_task()
    return server


def bare(case: SimpleNamespace, device: torch.device) -> Work:
    """The method's products and factorisations on ready matrices of their sizes."""
    rng = torch.Generator().manual_seed(0)

    def ready(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(device)

    Z, P, H = ready(case.n, case.d), ready(case.d, case.M), ready(case.n, case.M)
    groups, factors = ready(case.M, min(10 * case.K * case.C, case.n * case.K)), ready(case.M, 2 * case.r)
    small = H if case.n <= case.M else H.T
    outer, inner = peers.shifted(ready(case.M, case.M), 1e3), peers.shifted(ready(case.d, case.d), 1e3)
    B, B_inner = ready(case.M, case.C), ready(case.d, case.C)

    def local_solves() -> None:
        side = min(case.n, case.d)
        torch.cholesky_solve(B_inner[:side], torch.linalg.cholesky(inner[:side, :side]))

    parts: dict[str, tuple[int, Work]] = {
        "features": (case.K, lambda: Z @ P),
        "grams": (case.K, lambda: H.T @ H),
        "groups": (1, lambda: groups @ groups.T),
        "inputs": (case.K, lambda: Z.T @ Z),
        "local solves": (case.K, local_solves),
        "input solve": (1, lambda: torch.cholesky_solve(B_inner, torch.linalg.cholesky(inner))),
        "summaries": (case.K, lambda: torch.linalg.eigh(small @ small.T)),
        # In the first task, what there was before is empty: one less than clients.
        "merges": (case.K - 1, lambda: torch.linalg.eigh(factors.T @ factors)),
        "solve": (1, lambda: torch.cholesky_solve(B, torch.linalg.cholesky(outer))),
    }

    def run() -> None:
        for name in PARTS[case.method]:
            times, work = parts[name]
            for _ in range(times):
                work()

    return run


def plain_task(case: SimpleNamespace, shards: list[ClientData], known: Context) -> Side | None:
    """The same task in plain code; None for the methods that have no public code of this kind."""
    P = made.context_projection(known, case.M)

    def features(client_data: ClientData) -> torch.Tensor:
        return peers.random_features(client_data.inputs, P)

    def stsa() -> torch.Tensor:
        sent = [peers.statistics(client_data.inputs, client_data.labels, P, case.C) for client_data in shards]
        return peers.inverse_ridge(sum(G for G, _ in sent), sum(C for _, C in sent), STSA().gamma)

    def stsa_e() -> torch.Tensor:
        method, sent = STSAE(), []
        for client_data in shards:
            group = torch.arange(len(client_data.labels)) % method.dummy_clients
            sent.append(
                peers.group_sums(features(client_data), client_data.labels, group, method.dummy_clients, case.C)
            )
        C, n = torch.cat([C for C, _ in sent], dim=1), torch.cat([n for _, n in sent])
        return peers.inverse_ridge(peers.scatter(C, n), C.sum(dim=1), method.gamma)

    def afl(ridge: float = 0.0) -> torch.Tensor | None:
        gamma, sent = AFL().gamma, []
        for client_data in shards:
            X = client_data.inputs
            G = peers.shifted(X.T @ X, gamma)
            sent.append((G, torch.linalg.inv(G) @ peers.class_sums(X, client_data.labels, case.C)))
        return peers.aggregated(sent, gamma, ridge)

    def fedran() -> torch.Tensor:
        H = [features(client_data) for client_data in shards]
        V, sigma = peers.merged([peers.summary(one, case.r) for one in H], case.r)
        B = sum(peers.class_sums(one, client_data.labels, case.C) for one, client_data in zip(H, shards, strict=True))
        return V @ ((V.T @ B) / (sigma.square() + FedRAN().ridge).unsqueeze(1))

    def joint() -> torch.Tensor:
        Z, labels = (
            torch.cat([client_data.inputs for client_data in shards]),
            torch.cat([client_data.labels for client_data in shards]),
        )
        G, C = peers.statistics(Z, labels, P, case.C)
        return peers.inverse_ridge(G, C, CentralisedRidge().ridge)

    plain: dict[str, Work] = {
        "stsa": stsa,
        "stsa_e": stsa_e,
        "afl": afl,
        "afcl": partial(afl, AFCL().gamma),
        "fedran": fedran,
        "centralised_ridge": joint,
    }
    work = plain.get(case.method)
    return None if work is None else peer("plain", each(work))
