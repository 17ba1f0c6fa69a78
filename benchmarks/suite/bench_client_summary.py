"""FedRAN's client summary beside the smaller Gram matrix with its eigenvectors, and beside the whole SVD."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from fcl_bench.linalg.spectral import Spectrum, summarise
from suite import made, peers
from suite.lines import GRAM_ERROR, SVD
from suite.sides import Beside, each, limit, ours, peer, sizes


@sizes(
    smoke=[{"n": 40, "M": 96, "r": 16, "dtype": "float64"}],
    quick=[
        {"n": 500, "M": 2048, "r": 256, "dtype": "float32"},
        {"n": 500, "M": 2048, "r": 256, "dtype": "float64"},
        {"n": 1500, "M": 1024, "r": 128, "dtype": "float64"},
    ],
    full=[{"n": 2000, "M": 8192, "r": 1024, "dtype": dtype} for dtype in ("float32", "float64")],
)
def bench_client_summary(case, beside: Beside, device) -> None:
    H = made.random_features(case.n, 512 if case.M > 512 else 32, case.M, case.dtype, device)
    small = H if case.n <= case.M else H.T
    beside(
        ours("summarise", each(partial(summarise, H, case.r))),
        limit("product and eigh", each(lambda: torch.linalg.eigh(small.double() @ small.T.double()))),
        peer(SVD, each(lambda: peers.summary(H, case.r))),
        values={GRAM_ERROR: excess_error(H, summarise(H, case.r)[0], case.r)},
    )


def excess_error(H: torch.Tensor, sketch: Spectrum, rank: int) -> float:
    """||H'H - V S^2 V'|| / sigma_{r+1}^2 - 1 in the spectral norm: how far above the best of rank r (Eckart-Young).

    In float64, by Lanczos iterations on a product that needs no M x M matrix.
    """
    import scipy.sparse.linalg

    H = H.double().cpu()
    V, squares = sketch.V.double().cpu(), sketch.sigma.double().cpu().square()
    small = H @ H.T if len(H) <= H.shape[1] else H.T @ H
    best = float(torch.linalg.eigvalsh(small)[-rank - 1])

    def residual(x: np.ndarray) -> np.ndarray:
        v = torch.from_numpy(np.ascontiguousarray(x)).reshape(-1)
        return (H.T @ (H @ v) - V @ (squares * (V.T @ v))).numpy()

    M = H.shape[1]
    operator = scipy.sparse.linalg.LinearOperator((M, M), matvec=residual, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(M)
    (largest,) = scipy.sparse.linalg.eigsh(
        operator, k=1, which="LM", v0=start, ncv=min(64, M), tol=1e-9, return_eigenvectors=False
    )
    return abs(float(largest)) / best - 1
