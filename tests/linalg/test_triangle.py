"""Triangles of matrices, against NumPy's own indices of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.linalg.structure import packed, symmetric, triangular

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64]


def matrix(size: int, dtype: torch.dtype) -> torch.Tensor:
    rng = torch.Generator().manual_seed(size)
    return torch.randint(-100, 100, (size, size), generator=rng).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 2, 65, 700])
def test_a_triangle_is_its_entries_by_rows_and_back(size, dtype):
    full = matrix(size, dtype)
    upper = full.double().numpy()[np.triu_indices(size)]
    entries = packed(full)
    assert entries.dtype == dtype
    np.testing.assert_array_equal(entries.double().numpy(), upper)
    assert torch.equal(triangular(entries), full.triu())
    found = symmetric(entries)
    assert found.dtype == dtype
    assert torch.equal(found, found.T)
    assert torch.equal(found.triu(), full.triu())


def test_a_view_and_its_transpose_are_packed_as_they_stand():
    whole = matrix(40, torch.float64)
    for view in (whole.T, whole[3:20, 3:20], whole[::2, ::2]):
        assert torch.equal(packed(view), packed(view.contiguous()))


@pytest.mark.parametrize("count", [2, 4, 5, 7, 11])
def test_other_numbers_of_entries_are_no_triangle(count):
    with pytest.raises(ValueError, match=f"{count} entries"):
        triangular(torch.zeros(count))
