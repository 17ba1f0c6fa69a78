"""Random activations and bases, and what must hold of a basis."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from tests.methods import fedprotip_oracle as oracle

DTYPES = [torch.float64, torch.float32]
NOISE = {torch.float64: 1e-9, torch.float32: 1e-4}  # agreement of two ways to compute the same
ORTHONORMAL = {torch.float64: 1e-10, torch.float32: 1e-5}
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}  # what the bases are told to drop

seeds = st.integers(0, 10**6)
thresholds = st.one_of(st.floats(0.01, 0.99), st.sampled_from([1.0, 1e-9, 0.7, 0.9]))


def orthonormal(rng, d: int, q: int) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((d, min(q, d))))[0]


def activations(rng, d: int, m: int, rank: int) -> np.ndarray:
    """A (d, m) of that rank (at most), its singular values spread over about two decades."""
    rank = min(rank, d, m)
    return orthonormal(rng, d, rank) * np.geomspace(1, 0.01, rank or 1)[:rank] @ orthonormal(rng, m, rank).T


def tensor(array: np.ndarray, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(np.ascontiguousarray(array), dtype=dtype)


def array(t: torch.Tensor) -> np.ndarray:
    return t.to(torch.float64).numpy()


def assert_orthonormal(U: torch.Tensor, *others: torch.Tensor) -> None:
    atol = ORTHONORMAL[U.dtype]
    np.testing.assert_allclose(array(U.T @ U), np.eye(U.shape[1]), atol=atol)
    for Phi in others:
        np.testing.assert_allclose(array(Phi.T @ U), 0, atol=atol)


def assert_same_span(U: torch.Tensor, V: np.ndarray, atol: float) -> None:
    assert U.shape == V.shape
    np.testing.assert_allclose(oracle.projector(array(U)), oracle.projector(V), atol=atol)


def client_bases(rng, d: int, ranks: list[int], shared: int) -> list[np.ndarray]:
    """Bases that have some directions in common, each client's rotated its own way."""
    pool = orthonormal(rng, d, shared)
    bases = []
    for r in ranks:
        own = orthonormal(rng, d, r)
        n = min(shared, r // 2, d)
        chosen = pool[:, rng.permutation(pool.shape[1])[:n]]
        basis = np.linalg.qr(np.concatenate([chosen, own[:, : r - n]], axis=1))[0] if r else own
        bases.append(basis @ orthonormal(rng, basis.shape[1], basis.shape[1]) if basis.shape[1] else basis)
    return bases


def well_separated(bases: list[np.ndarray], d: int, dtype: torch.dtype = torch.float64) -> bool:
    """No direction is nearly, but not quite, in the span of the others."""
    stacked = np.concatenate(bases, axis=1)
    sigma = np.linalg.svd(stacked, compute_uv=False) if stacked.size else np.zeros(0)
    return not np.any((sigma > 1e-12) & (sigma < 100 * TOLERANCE[dtype]))


ranks = st.lists(st.integers(0, 12), min_size=1, max_size=6)


def softmax_context(seed: int, d: int = 12, classes: int = 5, batches: int = 8):
    rng = np.random.default_rng(seed)
    W, Phi = rng.standard_normal((classes, d)), orthonormal(rng, d, 5)
    data = [(rng.standard_normal((6, d)), rng.integers(classes, size=6)) for _ in range(batches)]
    return W, Phi, data
