"""Which random features are best for ridge regression, at the same number M of them: pooled features, no federation.

    .venv/bin/python -m benchmarks feature_kinds FEATURES.npz --M 2048 --seeds 0 1 2

The file is one of `data=features`. Ridge regression with lambda at 1 % of the mean eigenvalue and scaled scores, as the
sketches have it, learns from nine tenths of the training samples. The table has the accuracy on the last tenth, which
may choose a kind, and on the test set, which may not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

#: Rows whose random features are in memory at a time.
_ROWS = 4096
_SHARE = 0.01

#: Features Z (n, d) to random features H (n, M).
Map = Callable[[Tensor], Tensor]


def gaussian(d: int, M: int, rng: torch.Generator) -> Tensor:
    return torch.randn(d, M, generator=rng)


def orthogonal(d: int, M: int, rng: torch.Generator) -> Tensor:
    """Blocks of d orthogonal columns, as long as Gaussian ones (Yu et al. 2016)."""
    blocks = [torch.linalg.qr(gaussian(d, d, rng)).Q for _ in range(-(-M // d))]
    return torch.cat(blocks, dim=1)[:, :M] * torch.linalg.vector_norm(gaussian(d, M, rng), dim=0)


def hadamard(d: int, M: int, rng: torch.Generator) -> Tensor:
    """Blocks of H D H D H D (Yu et al. 2016), H a Walsh-Hadamard matrix of the next power of two, D random signs."""
    size = 1 << (d - 1).bit_length()
    H = torch.from_numpy(scipy.linalg.hadamard(size).astype(np.float32)) / size**0.5
    blocks = []
    for _ in range(-(-M // size)):
        block = torch.eye(size) * size**0.5
        for _ in range(3):
            block = H @ (block * (2 * torch.randint(2, (size, 1), generator=rng) - 1))
        blocks.append(block[:d])
    return torch.cat(blocks, dim=1)[:, :M]


def powers(Z: Tensor, power: float) -> Tensor:
    """(Z'Z / n)^power (d, d), at a scale that keeps the mean square of a feature."""
    values, V = torch.linalg.eigh((Z.T @ Z / len(Z)).double())
    found = ((V * values.clamp_min(values[-1] * 1e-6) ** power) @ V.T).float()
    return found * (Z.square().mean() / (Z @ found).square().mean()).sqrt()


def kinds(Z: Tensor, M: int, seed: int) -> Iterator[tuple[str, Map]]:
    """Names, and maps whose scales come from the training features Z (n, d)."""
    d = Z.shape[1]
    rng = torch.Generator().manual_seed(seed)
    P = gaussian(d, M, rng)
    yield "ReLU, Gaussian P", lambda z: (z @ P).relu()
    for name, draw in (("orthogonal", orthogonal), ("Walsh-Hadamard", hadamard)):
        own = draw(d, M, rng)
        yield f"ReLU, {name} P", lambda z, own=own: (z @ own).relu()
    yield "step (arc-cosine of order 0)", lambda z: (z @ P > 0).float()
    yield "ReLU squared (arc-cosine of order 2)", lambda z: (z @ P).relu().square()
    yield "absolute value", lambda z: (z @ P).abs()
    middle = Z.mean(0)
    yield "ReLU of z - mean", lambda z: ((z - middle) @ P).relu()
    spread = float(2 * (Z - middle).square().sum(1).mean()) ** 0.5
    u = 2 * torch.pi * torch.rand(M, generator=rng)
    for factor in (0.5, 1.0, 2.0):
        yield (
            f"cosine, bandwidth {factor:g} root mean square distances",
            lambda z, b=factor * spread: (z @ P / b + u).cos(),
        )
    for name, power in (("half whitened", -0.25), ("whitened", -0.5)):
        own = powers(Z, power) @ P
        yield f"ReLU, {name} z", lambda z, own=own: (z @ own).relu()
    unit = lambda z: z / torch.linalg.vector_norm(z, dim=1, keepdim=True)  # noqa: E731
    yield "ReLU, z of unit length", lambda z: (unit(z) @ P).relu()
    second = gaussian(M, M, rng) / M**0.5
    yield "two layers of ReLU", lambda z: ((z @ P).relu() @ second).relu()
    yield "z itself beside M - d of ReLU", lambda z: torch.cat([z * d**0.5, (z @ P[:, d:]).relu()], dim=1)


def accuracies(features: Map, Z: Tensor, y: Tensor, tests: list[tuple[Tensor, Tensor]]) -> list[float]:
    """In %, on each of `tests`, of ridge regression on the features of Z (n, d) with the labels y (n,)."""
    classes = int(y.max()) + 1
    G: Tensor | float = 0.0
    B: Tensor | float = 0.0
    for z, labels in zip(Z.split(_ROWS), y.split(_ROWS), strict=True):
        H = features(z).double()
        G, B = G + H.T @ H, B + H.T @ torch.nn.functional.one_hot(labels, classes).double()
    assert isinstance(G, Tensor)
    A = G + _SHARE * G.trace() / len(G) * torch.eye(len(G), dtype=G.dtype)
    W = torch.cholesky_solve(B, torch.linalg.cholesky(A))
    W = (W / (W * B).sum(0).sqrt()).float()
    found = []
    for z, labels in tests:
        right = [
            (features(part) @ W).argmax(1) == own for part, own in zip(z.split(_ROWS), labels.split(_ROWS), strict=True)
        ]
        found.append(100 * float(torch.cat(right).float().mean()))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", type=Path)
    parser.add_argument("--M", type=int, default=2048)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    asked = parser.parse_args(arguments)
    arrays = np.load(asked.features)
    Z, y = torch.from_numpy(arrays["x_train"]).float(), torch.from_numpy(arrays["y_train"]).long()
    held = len(Z) // 10
    test = torch.from_numpy(arrays["x_test"]).float(), torch.from_numpy(arrays["y_test"]).long()
    tests = [(Z[-held:], y[-held:]), test]
    found: dict[str, list[list[float]]] = {}
    for seed in asked.seeds:
        for name, features in kinds(Z[:-held], asked.M, seed):
            found.setdefault(name, []).append(accuracies(features, Z[:-held], y[:-held], tests))
    print("| random features | held-out training samples | test set |", "|---|---:|---:|", sep="\n")
    for name, rows in found.items():
        mean, spread = np.mean(rows, axis=0), np.std(rows, axis=0, ddof=1 if len(rows) > 1 else 0)
        print(f"| {name} |", " | ".join(f"{m:.2f} ± {s:.2f}" for m, s in zip(mean, spread, strict=True)), "|")


if __name__ == "__main__":
    main()
