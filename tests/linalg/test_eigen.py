"""Leading eigenpairs, by each of the ways in which they are found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.linalg.spectral import leading_eigenpairs


def matrix(n: int, spectrum: str) -> torch.Tensor:
    rng = np.random.default_rng(n)
    Q = np.linalg.qr(rng.standard_normal((n, n)))[0]
    values = {
        "spread": np.geomspace(1e-12, 1.0, n),
        "clustered": np.where(np.arange(n) < n // 2, 1e-3, 1.0),
        "low rank": np.where(np.arange(n) < n - n // 8 - 1, 0.0, 1.0) * rng.random(n),
        "equal": np.ones(n),
    }[spectrum]
    G = Q * values @ Q.T
    return torch.from_numpy((G + G.T) / 2)


@pytest.mark.slow_cases(
    "300-1-clustered", "300-1-low rank", "300-1-spread", "300-299-clustered", "300-40-clustered", "300-75-low rank"
)
@pytest.mark.parametrize("spectrum", ["spread", "clustered", "low rank", "equal"])
@pytest.mark.parametrize(
    ("n", "count"), [(1, 1), (50, 7), (50, 50), (300, 1), (300, 40), (300, 75), (300, 151), (300, 299), (300, 300)]
)
def test_they_are_the_largest_ones(n, count, spectrum):
    G = matrix(n, spectrum)
    exact = np.linalg.eigvalsh(G.numpy())
    values, V = leading_eigenpairs(G.clone(), count)
    assert (values.shape, V.shape) == ((count,), (n, count))
    np.testing.assert_allclose(values.numpy(), exact[n - count :], atol=1e-13)
    np.testing.assert_allclose((V.T @ V).numpy(), np.eye(count), atol=1e-12)
    np.testing.assert_allclose((G @ V).numpy(), (V * values).numpy(), atol=1e-13)


@pytest.mark.parametrize(("n", "count"), [(50, 20), (300, 20), (300, 200)])
def test_the_upper_triangle_is_all_that_is_read(n, count):
    G = matrix(n, "spread")
    expected, _ = leading_eigenpairs(G.clone(), count)
    half = G.clone().triu() + torch.full_like(G, torch.nan).tril(-1).nan_to_num(7.0)
    values, V = leading_eigenpairs(half, count)
    np.testing.assert_allclose(values.numpy(), expected.numpy(), atol=1e-14)
    np.testing.assert_allclose((G @ V).numpy(), (V * values).numpy(), atol=1e-13)


def test_an_older_scipy_serves_too(monkeypatch):
    from scipy.linalg import lapack

    monkeypatch.delattr(lapack, "dstevd", raising=False)  # on Python 3.10 SciPy is such a one
    G = matrix(300, "spread")
    values, V = leading_eigenpairs(G.clone(), 151)
    np.testing.assert_allclose((G @ V).numpy(), (V * values).numpy(), atol=1e-13)


@pytest.mark.parametrize("count", [10, 150, 300])
@pytest.mark.parametrize("n", [50, 300])
def test_a_matrix_of_no_numbers_is_told(n, count):
    with pytest.raises(torch.linalg.LinAlgError):
        leading_eigenpairs(torch.full((n, n), torch.nan, dtype=torch.float64), min(n, count))
