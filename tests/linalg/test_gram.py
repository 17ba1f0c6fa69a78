"""Symmetric products, small ones by torch and large ones by BLAS's rank-k update."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.linalg import gram as updates
from fcl_bench.linalg.gram import add_gram, add_grams, gram, grams

SHAPES = [(40, 30), (30, 40), (1, 7), (600, 513)]


@pytest.fixture(params=["product", "rank-k update"])
def way(request, monkeypatch) -> str:
    """Each test by both ways, whatever the size."""
    monkeypatch.setattr(updates, "_WORTHWHILE", 0 if request.param == "rank-k update" else 2**62)
    monkeypatch.setattr(updates, "_ROWS", 0)
    return request.param


def matrix(n: int, M: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    rng = torch.Generator().manual_seed(n * M)
    A = torch.randn(n, M, dtype=torch.float64, generator=rng).to(dtype)
    if layout == "columns":
        return A.T.contiguous().T
    return torch.randn(n, 2 * M, dtype=dtype)[:, ::2].copy_(A) if layout == "strided" else A


def relative(found: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.abs(found.double().numpy() - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("layout", ["rows", "columns", "strided"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("n", "M"), SHAPES)
def test_a_gram_matrix_is_the_plain_product(way, n, M, dtype, layout):
    A = matrix(n, M, dtype, layout)
    found = gram(A)
    exact = A.double().numpy()
    assert found.dtype == dtype
    assert relative(found, exact.T @ exact) < 20 * torch.finfo(dtype).eps
    if way == "rank-k update":
        assert torch.equal(found, found.T)


@pytest.mark.parametrize("weight", [1.0, -0.5])
def test_what_was_there_before_stays_and_blocks_add_up(way, weight):
    A = matrix(600, 513, torch.float32, "rows")
    G = matrix(40, 513, torch.float64, "rows")
    G = G.T @ G
    G = (G + G.T) / 2
    before = G.clone()
    assert add_grams(G, A.split(170), weight) is G
    exact = A.double().numpy()
    expected = before.numpy() + weight * exact.T @ exact
    assert relative(G, expected) < 1e-14  # in float64, as G is
    assert torch.equal(G, G.T) or way == "product"
    other = before.clone()
    assert relative(add_gram(other, A.double(), weight), expected) < 1e-14


def test_half_of_it_is_the_upper_half(way):
    A = matrix(50, 40, torch.float64, "rows")
    found = add_grams(torch.zeros(40, 40, dtype=torch.float64), [A], whole=False)
    torch.testing.assert_close(found.triu(), (A.T @ A).triu())


class Dirty:
    """Makes matrices of NaN, as memory that was never written to may look."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def new_empty(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=self._dtype)


@pytest.mark.parametrize("rows", [[], [0], [170, 170, 30], [3, 600]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_new_sum_is_that_from_zero_bit_for_bit(way, rows, dtype):
    blocks = [matrix(n, 513, torch.float32, "rows") for n in rows]
    found = grams(blocks, Dirty(dtype), 513)
    assert torch.equal(found, add_grams(torch.zeros(513, 513, dtype=dtype), blocks))


def test_a_matrix_that_is_a_view_is_added_to_in_place(way):
    whole = torch.zeros(60, 60, dtype=torch.float64)
    A = matrix(30, 40, torch.float64, "rows")
    add_gram(whole[:40, :40], A)
    torch.testing.assert_close(whole[:40, :40], A.T @ A)
    assert not whole[40:].any()


def test_no_samples_give_zeros(way):
    assert torch.equal(gram(torch.zeros(0, 5)), torch.zeros(5, 5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("M", [1, 63, 64, 65, 640, 1200])
def test_the_lower_triangle_is_the_upper_one_to_the_last_bit(way, M, dtype):
    A = matrix(3, M, dtype, "rows")
    upper = add_grams(torch.zeros(M, M, dtype=dtype), [A], whole=False).triu()
    found = add_gram(torch.zeros(M, M, dtype=dtype), A)
    assert torch.equal(found.triu(), upper)
    if way == "rank-k update":
        assert torch.equal(found, upper + upper.triu(1).T)


def test_few_rows_are_multiplied_whole_unless_half_is_there_or_enough(monkeypatch):
    """Half the product of few rows costs more than it saves once it has to be mirrored."""
    monkeypatch.setattr(updates, "_WORTHWHILE", 0)
    halves: list[int] = []
    half = updates._add_upper_half

    def counted(G: torch.Tensor, A: torch.Tensor, *weights: float) -> None:
        halves.append(len(A))
        half(G, A, *weights)

    monkeypatch.setattr(updates, "_add_upper_half", counted)
    few, many = matrix(63, 30, torch.float64, "rows"), matrix(64, 30, torch.float64, "rows")
    exact = (few.T @ few, many.T @ many)
    for blocks, whole, expected in (
        ([few], True, []),
        ([few], False, [63]),
        ([many], True, [64]),
        ([many, few], True, [64, 63]),
    ):
        halves.clear()
        found = add_grams(torch.zeros(30, 30, dtype=torch.float64), blocks, whole=whole)
        assert halves == expected
        wanted = sum(exact[0] if block is few else exact[1] for block in blocks)
        torch.testing.assert_close(found.triu(), wanted.triu(), rtol=1e-13, atol=1e-13)
