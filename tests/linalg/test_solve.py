"""Symmetric systems: every way out, and what is told."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.linalg import gram, solve
from fcl_bench.linalg.solve import _Noise, relative_rounding, solve_symmetric


@pytest.fixture(autouse=True, params=["estimated", "exact", "factorised by SciPy"])
def ways(request, monkeypatch) -> None:
    """Each test with the extreme eigenvalues found either way, and with either Cholesky factor, whatever the size."""
    monkeypatch.setattr(solve, "_SMALL", 2**30 if request.param == "exact" else 0)
    if request.param == "factorised by SciPy":
        monkeypatch.setattr(gram, "_WORTHWHILE", 0)


def system(values, seed=0):
    """A symmetric matrix with the given eigenvalues, and a right-hand side."""
    rng = np.random.default_rng(seed)
    Q = np.linalg.qr(rng.standard_normal((len(values), len(values))))[0]
    return (
        Q,
        torch.from_numpy(Q * np.asarray(values, dtype=float) @ Q.T),
        torch.from_numpy(rng.standard_normal((len(values), 3))),
    )


@pytest.mark.parametrize("ratio", [1.0, 1e3, 1e6, 1e9])
def test_a_definite_system_is_solved_and_its_condition_estimated(ratio):
    _, A, B = system(np.geomspace(1, ratio, 20))
    W, condition, trouble = solve_symmetric(A, B)
    np.testing.assert_allclose(W, np.linalg.solve(A, B), rtol=1e-12 * ratio)
    assert 0.5 * ratio <= condition <= 1.01 * ratio
    assert trouble == ""


def test_an_ill_conditioned_system_is_told_with_its_condition_number():
    _, A, B = system(np.geomspace(1, 1e7, 20))
    assert solve_symmetric(A, B).trouble == ""
    _, condition, trouble = solve_symmetric(A, B, rounding=1e-7)
    assert f"condition number {condition:.1e}" in trouble


@pytest.mark.parametrize("rank", [0, 1, 12])
def test_a_singular_system_gets_the_moore_penrose_solution(rank):
    values = np.concatenate([np.geomspace(1, 50, rank), np.zeros(20 - rank)])
    Q, A, B = system(values)
    B = A @ B
    W, _, trouble = solve_symmetric(A, B)
    np.testing.assert_allclose(W, np.linalg.pinv(A.numpy(), rcond=1e-12, hermitian=True) @ B.numpy(), atol=1e-12)
    assert (f"rank {rank} of 20" if rank else "the system is zero") in trouble
    # Nothing outside the range of A: the solution of least norm.
    np.testing.assert_allclose(Q[:, rank:].T @ W.numpy(), 0, atol=1e-12)


def test_an_indefinite_system_is_a_semidefinite_one_with_noise_of_that_size():
    """A Gram matrix has no eigenvalue below zero: one of -3 says that others of size 3 are noise as well."""
    values = np.array([-3.0, -0.5, 1.0, 4.0, *np.geomspace(5, 50, 16)])
    Q, A, B = system(values)
    W, condition, trouble = solve_symmetric(A, B)
    kept = Q[:, 4:]
    np.testing.assert_allclose(W, kept @ ((kept.T @ B.numpy()) / values[4:, None]), rtol=1e-9, atol=1e-12)
    assert condition == pytest.approx(10)
    for part in (
        "indefinite",
        "smallest eigenvalue -3",
        "2 of 20 below zero",
        "condition number of the 16 larger ones",
    ):
        assert part in trouble


@pytest.mark.parametrize("scale", [1e-200, 1e-160, 1.0, 1e160, 1e300])
def test_the_scale_of_a_system_does_not_matter(scale):
    _, A, B = system(np.geomspace(1, 2, 20))
    W, condition, trouble = solve_symmetric(scale * A, B)
    torch.testing.assert_close(W * scale, solve_symmetric(A, B).W, rtol=1e-12, atol=0)
    assert condition == pytest.approx(2, rel=0.2)
    assert trouble == ""


def test_an_empty_system_is_no_trouble():
    W, condition, trouble = solve_symmetric(torch.zeros(0, 0), torch.zeros(0, 3))
    assert (W.shape, condition, trouble) == ((0, 3), 1.0, "")


def test_what_cancellation_left_is_no_rank():
    """Regularisers of size 1 taken out of data of size 1e-12: nothing is left but rounding."""
    _, A, B = system(np.full(20, 1e-12))
    summed = A + torch.eye(20, dtype=torch.float64)
    W, condition, trouble = solve_symmetric(summed, B, 1e-7, shift=-1)
    assert torch.equal(W, torch.zeros_like(B))
    assert "rank 0 of 20" in trouble
    assert condition == 1.0


def test_float32_sums_are_solved_in_float64():
    _, A, B = system(np.geomspace(1, 1e4, 20))
    W = solve_symmetric(A.float(), B.float(), relative_rounding(torch.float32)).W
    assert W.dtype == torch.float32
    exact = np.linalg.solve(A.float().double(), B.float().double())
    np.testing.assert_allclose(W, exact, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [10, 100, 300])
def test_eigenvalues_of_rounded_gram_matrices_move_by_no_more_than_their_noise(size, dtype):
    """Along every eigenvector; and by more than a hundredth of it on the whole, so the estimate is no mere bound."""
    rng = np.random.default_rng(0)
    X = np.maximum(rng.standard_normal((2 * size, 30)) @ rng.standard_normal((30, size)), 0)
    G = torch.from_numpy(X.T @ X / np.square(X).sum())
    rounded = torch.tril(G.to(dtype).double())
    rounded = rounded + torch.tril(rounded, -1).T
    values, V = torch.linalg.eigh(G)
    moved = (torch.linalg.eigvalsh(rounded) - values).abs()
    noise = _Noise(G, 0.0, relative_rounding(dtype)).along(V, float(values[-1]))
    assert (moved <= noise).all()
    assert (moved / noise).max() > 0.01


@pytest.mark.parametrize("M", [33, 150])
def test_scipys_factor_is_torchs_to_rounding(monkeypatch, M):
    _, A, _ = system(np.linspace(1, 1e4, M))
    expected = torch.linalg.cholesky(A)
    A = A + torch.ones_like(A).triu(1)  # the upper triangle is not read
    monkeypatch.setattr(gram, "_WORTHWHILE", 0)
    found = solve._factored(A)
    assert float((found - expected).abs().max()) < 1e-13 * float(expected.abs().max())
    assert not found.triu(1).any()
    assert solve._factored(A - 2e4 * torch.eye(M, dtype=A.dtype)) is None
