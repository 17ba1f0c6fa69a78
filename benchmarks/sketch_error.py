"""How far the Gaussian sketch's W is from that of the exact Gram matrix, beside what theory allows.

    .venv/bin/python -m benchmarks sketch_error method.M=512,1024,2048 method.rank=0,16,64,256 data=features \
        data.path=FEATURES.npz tasks=10

Each pair of M and rank is one run of `method=gaussian_sketch`; then the exact G = H'H and B = H'Y of all training
samples are formed, which no server has. docs/explanation/sketch_error.md has the theory and the columns' names.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.linalg
import torch

from fcl_bench.composition import composed
from fcl_bench.config import load_settings
from fcl_bench.engine.loop import Federation
from fcl_bench.execution.inputs import prepare_inputs
from fcl_bench.execution.options import clients_of
from fcl_bench.execution.plan import make_plan
from fcl_bench.linalg.gram import add_gram, class_sums
from fcl_bench.methods.closed_form.gaussian_sketch import GaussianSketchServer


class Bound(NamedTuple):
    """Of the solutions of A W = B and A^ W^ = B^, both matrices positive definite, relative to |A^(1/2) W|.

    Attributes:
        least, most: the extreme eigenvalues of Delta = A^(-1/2) (A^ - A) A^(-1/2).
        sums: |A^(-1/2) (B^ - B)|.
        matrix: |Delta A^(1/2) W|.
        error: |A^(1/2) (W^ - W)|, all three in the Frobenius norm.
    """

    least: float
    most: float
    sums: float
    matrix: float
    error: float

    @property
    def allowed(self) -> float:
        """The most that the error can be: (sums + matrix) / (1 + least)."""
        return (self.sums + self.matrix) / (1 + self.least)


def bound(
    A: np.ndarray, B: np.ndarray, A_estimate: np.ndarray, B_estimate: np.ndarray
) -> tuple[Bound, np.ndarray, np.ndarray]:
    """The bound and the two solutions W and W^ (M, C), for A (M, M) and B (M, C)."""
    L = np.linalg.cholesky(A)

    def whitened(X: np.ndarray) -> np.ndarray:
        return scipy.linalg.solve_triangular(L, X, lower=True)

    W = scipy.linalg.cho_solve((L, True), B)
    W_estimate = scipy.linalg.solve(A_estimate, B_estimate, assume_a="pos")
    Delta = whitened(whitened(A_estimate - A).T)
    values = np.linalg.eigvalsh((Delta + Delta.T) / 2)
    scores = L.T @ W
    size = np.linalg.norm(scores)
    parts = (whitened(B_estimate - B), Delta @ scores, L.T @ (W_estimate - W))
    sums, matrix, error = (float(np.linalg.norm(part) / size) for part in parts)
    return Bound(float(values[0]), float(values[-1]), sums, matrix, error), W, W_estimate


def accuracy(H: torch.Tensor, columns: np.ndarray, W: np.ndarray, B: np.ndarray) -> float:
    """In %, of the scores H W scaled as the method scales them, of samples H (n, M) of the classes `columns` (n,)."""
    scales = 1 / np.sqrt(np.maximum((W * B).sum(0), np.finfo(float).tiny))
    return 100 * float(((H.double().numpy() @ (W * scales)).argmax(1) == columns).mean())


def line(overrides: list[str]) -> str:
    """One run, and its line of the table."""
    plan = make_plan(load_settings(composed(["method=gaussian_sketch", *overrides])))
    stream = plan.dealt.stream
    with plan.settings.transport.connect() as link, tempfile.TemporaryDirectory() as scratch:
        inputs = prepare_inputs(plan, Path(scratch), link)
        transport = link.federate(clients_of(plan), inputs.train, Path(scratch))
        federation = Federation(plan.settings.method, plan.context, stream, transport, inputs.test, {}, steps=())
        federation.run(lambda _: None)
    server = federation.server
    assert isinstance(server, GaussianSketchServer)
    M, ridge = server.dimension, server.ridge * np.eye(server.dimension)
    learnt, tested = np.concatenate(stream.train), np.concatenate(stream.test)
    G, sums = torch.zeros(M, M, dtype=torch.float64), torch.zeros(*server.B.shape, dtype=torch.float64)
    for indices in torch.from_numpy(learnt).split(server.random_features.rows):
        H = server.random_features.map(inputs.train[indices].to(server.B)).double()
        add_gram(G, H)
        sums += class_sums(H, torch.from_numpy(stream.train_columns[indices]), sums.shape[1])
    B, B_estimate = sums.numpy(), server.B.double().numpy()
    found, W, W_estimate = bound(G.numpy() + ridge, B, server.gram().double().numpy() + ridge, B_estimate)
    H = server.random_features.map(inputs.test[torch.from_numpy(tested)].to(server.B))
    columns = stream.test_columns[tested]
    exact, ours = accuracy(H, columns, W, B), accuracy(H, columns, W_estimate, B_estimate)
    largest = federation.state.ledger.rows["up_bytes"].max() / 2**20
    cells = [*(f"{value:.3f}" for value in (*found, found.allowed)), f"{exact:.2f}", f"{ours:.2f}"]
    return " | ".join([str(M), str(server.method.rank), f"{largest:.3f}", *cells])


def main(arguments: list[str]) -> None:
    lists = {key: value.split(",") for key, value in (word.split("=", 1) for word in arguments)}
    print(
        "| M | r | MiB | least | most | sums | matrix | error | allowed | A_T of W | A_T of W^ |",
        "|---" * 11 + "|",
        sep="\n",
    )
    for values in itertools.product(*lists.values()):
        print(f"| {line([f'{key}={value}' for key, value in zip(lists, values, strict=True)])} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
