"""One pass over tasks and clients for all variants, and the table of results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fcl_bench.methods.closed_form.algebra.random_features import RandomFeatures
from fcl_bench.methods.closed_form.algebra.ridge import score_scales
from fcl_bench.randomness import derived_seed
from sketches.local import Local
from sketches.server import Server
from sketches.stream import Stream
from sketches.variants import Variant

Tensor = torch.Tensor
#: Directions of a client's spectrum that are found at most, for variants that share ranks out unevenly, per base rank.
MOST = 4


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


def accuracies(W: Tensor, B: Tensor, H: Tensor, labels: Tensor) -> tuple[float, float]:
    """Percent right, plainly and with each class's scores divided by sqrt(B_c'w_c)."""
    scores = H @ W.to(H)
    right = [x.argmax(1) == labels for x in (scores, scores * score_scales((B * W).sum(0)).to(H))]
    return 100 * float(right[0].double().mean()), 100 * float(right[1].double().mean())


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
