"""STSA with small clients: whole rounds of the engine beside plain loops that sum h.T @ h.

Processor seconds are what counts here (`processor` in the JSON, and the values below the row): many small matrices wait
for memory, and a busy machine shows in wall time first.
"""

from __future__ import annotations

import statistics
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from fcl_bench import environment
from fcl_bench.data.splits.base import Stream
from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.loop import Federation
from fcl_bench.methods.closed_form.stsa import STSA
from suite import made, peers
from suite.sides import Beside, Side, Work, each, ours, peer, sizes


@sizes(
    smoke=[{"K": 2, "n": 20, "d": 16, "M": 48, "C": 4, "dtype": "float64"}],
    quick=[{"K": 20, "n": 150, "d": 512, "M": 1024, "C": 10, "dtype": "float64"}],
    full=[{"K": 20, "n": 50, "d": 512, "M": 2048, "C": 10, "dtype": "float64"}],
)
def bench_small_clients(case, beside: Beside, device) -> None:
    environment.reuse_freed_memory()  # as the command does
    sides = sides_of(case, device)
    beside(*sides)
    mine, *others = (side.processor for side in sides)
    beside.add_values(
        {
            f"processor seconds, ours / {side.what}": statistics.median(
                one / other for one, other in zip(mine, theirs, strict=True)
            )
            for side, theirs in zip(sides[1:], others, strict=True)
        }
    )


def sides_of(case: SimpleNamespace, device: torch.device) -> tuple[Side, Side, Side]:
    """One task: messages, codec, admission, ledger and solve on our side; plain tensors on the others."""
    known = made.context(case.d, case.dtype, device)
    Z, labels = made.features(case.K * case.n, case.d, case.C, torch.float32), made.labels(case.K * case.n, case.C)
    P, shards = made.context_projection(known, case.M), np.split(np.arange(len(labels)), case.K)

    def rounds() -> Work:
        method, everyone = STSA(M=case.M), np.arange(len(labels))
        numbers = labels.numpy()
        stream = Stream((made.task(case.C),), np.arange(case.C), numbers, numbers, (everyone,), (everyone[:1],))
        transport = InProcess.of(method, known, [shards], numbers, np.ones(len(labels), dtype=bool), Z)
        federation = Federation(method, known, stream, transport, Z[:1])
        return partial(federation.run, lambda _: None)

    def samples(client: int) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.from_numpy(shards[client])
        return Z[chosen].to(device, case.dtype), labels[chosen].to(device)

    def loop() -> torch.Tensor:
        G, B = torch.zeros(case.M, case.M).to(P), torch.zeros(case.M, case.C).to(P)
        for client in range(case.K):
            z, y = samples(client)
            h = peers.random_features(z, P)
            G += h.T @ h
            B += h.T @ torch.nn.functional.one_hot(y, case.C).to(h)
        return torch.linalg.solve(peers.shifted(G, STSA().gamma), B)

    def public() -> torch.Tensor:
        sent = [peers.statistics(*samples(client), P, case.C) for client in range(case.K)]
        return peers.inverse_ridge(sum(G for G, _ in sent), sum(B for _, B in sent), STSA().gamma)

    return (
        ours("whole rounds", rounds),
        peer("a loop of h.T @ h", each(loop)),
        peer("class sums by sample", each(public)),
    )
