"""The bound of benchmarks/sketch_error.py holds for any pair of systems, and its parts are what they are called."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sketch_error import bound, main


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.floats(0.01, 3))
def test_no_error_exceeds_the_bound(seed, M, mismatch):
    rng = np.random.default_rng(seed)
    H, other = rng.standard_normal((2, 3 * M, M))
    A, B = H.T @ H + 0.1 * np.eye(M), rng.standard_normal((M, 4))
    estimate = A + mismatch * other.T @ other - 0.5 * mismatch * A / (1 + mismatch)
    found, W, W_estimate = bound(A, B, estimate, B + mismatch * rng.standard_normal((M, 4)))
    values, V = np.linalg.eigh(A)
    root = (V * np.sqrt(values)) @ V.T
    size = np.linalg.norm(root @ np.linalg.inv(A) @ B)
    assert found.error == pytest.approx(np.linalg.norm(root @ (W_estimate - W)) / size)
    Delta = np.linalg.inv(root) @ (estimate - A) @ np.linalg.inv(root)
    assert [found.least, found.most] == pytest.approx(np.linalg.eigvalsh(Delta)[[0, -1]])
    assert found.error <= found.allowed * (1 + 1e-9)


def test_an_exact_estimate_has_no_error():
    A, B = np.diag([1.0, 2.0]), np.eye(2)
    assert list(bound(A, B, A, B)[0]) == pytest.approx([0] * 5)


@pytest.mark.slow
def test_the_table_has_a_line_for_each_pair(capsys):
    main(["method.M=64", "method.rank=0,64", "data=digits"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    for line in lines[2:]:
        error, allowed = (float(cell) for cell in line.split("|")[8:10])
        assert 0 < error <= allowed
