"""Matrix products, small ones by torch and large ones by SciPy's BLAS."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.linalg import gram as module
from fcl_bench.linalg.gram import product


def laid_out(A: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "columns":
        return A.T.contiguous().T
    return torch.empty(len(A), 2 * A.shape[1], dtype=A.dtype)[:, ::2].copy_(A) if layout == "strided" else A


@pytest.mark.parametrize("least", [0, 2**62], ids=["BLAS", "torch"])
@pytest.mark.parametrize("left", ["rows", "columns", "strided"])
@pytest.mark.parametrize("right", ["rows", "columns", "strided"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (40, 7, 30), (3, 200, 5), (5, 4, 0)])
def test_a_product_is_the_plain_one_whatever_the_layout_and_has_its_columns_together(
    monkeypatch, least, left, right, shape
):
    monkeypatch.setattr(module, "_WORTHWHILE", least)
    rng, (n, k, m) = np.random.default_rng(sum(shape)), shape
    a, b = rng.standard_normal((n, k)), rng.standard_normal((k, m))
    A, B = laid_out(torch.from_numpy(a), left), laid_out(torch.from_numpy(b), right)
    found = product(A, B)
    assert np.abs(found.numpy() - a @ b).max(initial=0) < 1e-13
    assert found.T.is_contiguous()
    assert np.array_equal(A, a)
    assert np.array_equal(B, b)


def test_float32_stays_float32(monkeypatch):
    monkeypatch.setattr(module, "_WORTHWHILE", 0)
    A = torch.randn(20, 10)
    assert product(A, A.T).dtype == torch.float32
