"""Rows with NaN or infinity are found wherever they are, in every type that features come in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fcl_bench.linalg import tensors
from fcl_bench.linalg.tensors import rows_not_finite

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@given(
    rows=st.integers(0, 40),
    columns=st.integers(1, 70),
    dtype=st.sampled_from(TYPES),
    bad=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from([np.nan, np.inf, -np.inf])), max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_rows_are_those_in_which_some_number_is_not_finite(rows, columns, dtype, bad, seed):
    matrix = np.random.default_rng(seed).standard_normal((rows, columns))
    for place, value in bad if matrix.size else ():
        matrix.flat[place % matrix.size] = value
    expected = [row for row in range(rows) if not all(map(np.isfinite, matrix[row]))]
    assert rows_not_finite(torch.from_numpy(matrix).to(dtype)).tolist() == expected


@pytest.mark.parametrize("dtype", TYPES)
def test_the_greatest_numbers_of_a_type_are_finite(dtype):
    ends = torch.finfo(dtype)
    assert rows_not_finite(torch.tensor([[ends.max, ends.min, ends.tiny]], dtype=dtype)).tolist() == []


def test_pieces_count_rows_of_the_whole_matrix(monkeypatch):
    monkeypatch.setattr(tensors, "_ROWS", 3)
    matrix = torch.zeros(10, 2)
    matrix[[2, 3, 9], [0, 1, 1]] = torch.nan
    assert rows_not_finite(matrix).tolist() == [2, 3, 9]
