"""Summaries and merges of Gram matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.linalg.spectral import Spectrum, summarise
from fcl_bench.methods.closed_form.algebra.merging import Merger, merge


def gram_of(spectrum: Spectrum) -> torch.Tensor:
    return spectrum.V @ torch.diag(spectrum.sigma**2) @ spectrum.V.T


def relu_features(n: int, M: int, seed: int, inputs: int = 6) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    Z = torch.randn(n, inputs, dtype=torch.float64, generator=rng) + 0.5
    return (Z @ torch.randn(inputs, M, dtype=torch.float64, generator=rng)).relu()


shapes = st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 70), st.integers(0, 10**6))


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_the_residual_is_the_next_singular_value_squared(shape):
    n, M, rank, seed = shape
    H = relu_features(n, M, seed)
    spectrum, residual = summarise(H, rank)
    singular = np.linalg.svd(H.numpy(), compute_uv=False)
    scale = singular[0] ** 2 if singular[0] > 0 else 1.0
    expected = singular[rank] ** 2 if rank < len(singular) else 0.0
    assert abs(residual - expected) <= 1e-12 * scale
    error = np.linalg.norm((H.T @ H - gram_of(spectrum)).numpy(), 2)
    assert abs(error - expected) <= 1e-10 * scale


@settings(max_examples=80, deadline=None)
@given(shapes, st.sampled_from([torch.float64, torch.float32]))
def test_a_summary_is_orthonormal_descending_and_positive(shape, dtype):
    n, M, rank, seed = shape
    (V, sigma), _ = summarise(relu_features(n, M, seed).to(dtype), rank)
    r = len(sigma)
    assert V.dtype == sigma.dtype == dtype
    assert V.shape == (M, r)
    assert r <= min(rank, n, M)
    np.testing.assert_allclose((V.T @ V).numpy(), np.eye(r), atol=1e-9 if dtype == torch.float64 else 2e-5)
    assert (sigma > 0).all()
    assert (sigma[:-1] >= sigma[1:] * (1 - 1e-12)).all()


def test_generic_data_keeps_the_nominal_rank():
    for n, M, rank in [(10, 40, 64), (10, 40, 7), (50, 20, 20), (50, 20, 64), (1, 20, 5)]:
        H = torch.randn(n, M, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        assert len(summarise(H, rank)[0].sigma) == min(rank, n, M)


def test_no_samples_and_zero_features_give_an_empty_summary():
    for H in (torch.zeros(0, 5, dtype=torch.float64), torch.zeros(4, 5, dtype=torch.float64)):
        spectrum, residual = summarise(H, 3)
        assert spectrum.V.shape == (5, 0)
        assert residual == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 30), st.integers(0, 10**6))
def test_a_merge_is_the_best_approximation_of_the_sum(count, rank, seed):
    parts = [summarise(relu_features(8, 25, seed + i), 6)[0] for i in range(count)]
    merged, dropped = merge(parts, rank)
    total = sum(gram_of(part) for part in parts)
    eigenvalues = torch.linalg.eigvalsh(total).flip(0)
    expected = float(eigenvalues[rank]) if rank < 25 else 0.0
    error = float(torch.linalg.matrix_norm(total - gram_of(merged), 2))
    assert abs(error - expected) <= 1e-10 * float(eigenvalues[0])
    assert abs(dropped - expected) <= 1e-10 * float(eigenvalues[0])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(2, 12), st.integers(0, 10**6))
def test_the_joint_merge_is_never_the_worst(clients, rank, seed):
    """Against the sum of the uploaded sketches no rank-r matrix beats it (Eckart-Young)."""
    parts = [summarise(relu_features(10, 30, seed + i), rank)[0] for i in range(clients)]
    total = sum(gram_of(part) for part in parts)
    errors = {}
    for name, joint in (("sequential", False), ("joint", True)):
        m = Merger(rank, joint)
        for part in parts:
            m.add(part)
        errors[name] = float(torch.linalg.matrix_norm(total - gram_of(m.result().summary), 2))
    slack = 1e-10 * float(torch.linalg.matrix_norm(total, 2))
    assert errors["joint"] <= min(errors.values()) + slack


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 20), st.booleans(), st.integers(0, 10**6))
def test_the_gram_error_stays_within_theorem_1(clients, rank, joint, seed):
    """||G - G~|| <= the first dropped sigma^2 of each summary + the first dropped eigenvalue of each merge (Eq. 24)."""
    features = [relu_features(12, 20, seed + i) for i in range(clients)]
    merger, residuals = Merger(rank, joint), 0.0
    for H in features:
        summary, residual = summarise(H, rank)
        residuals += residual
        merger.add(summary)
    sketch = merger.result().summary
    bound = residuals + merger.losses.first
    exact = sum(H.T @ H for H in features)
    error = float(torch.linalg.matrix_norm(exact - gram_of(sketch), 2))
    assert error <= bound + 1e-10 * float(torch.linalg.matrix_norm(exact, 2))


def test_merging_with_an_empty_state_returns_the_other_operand():
    spectrum, _ = summarise(relu_features(5, 12, 0), 4)
    empty = Spectrum(spectrum.V[:, :0], spectrum.sigma[:0])
    for parts in ([empty, spectrum], [spectrum, empty]):
        merged, dropped = merge(parts, 4)
        assert torch.equal(merged.V, spectrum.V)
        assert dropped == 0
    assert len(merge([empty, empty], 4)[0].sigma) == 0


@pytest.mark.parametrize("ratio", [1e-2, 1e-5, 1e-9])
def test_small_singular_values_keep_their_relative_accuracy(ratio):
    """Squaring the condition number must not cost what lambda is compared with."""
    rng = np.random.default_rng(0)
    U = np.linalg.qr(rng.standard_normal((8, 8)))[0]
    V = np.linalg.qr(rng.standard_normal((30, 8)))[0]
    singular = np.geomspace(1.0, ratio, 8)
    spectrum, _ = summarise(torch.from_numpy(U * singular @ V.T), 8)
    np.testing.assert_allclose(spectrum.sigma.numpy(), singular, rtol=1e-6)
    np.testing.assert_allclose((spectrum.V.T @ spectrum.V).numpy(), np.eye(8), atol=1e-9)


@pytest.mark.parametrize("smallest", [0.5, 5e-2, 1.5e-3, 1e-5])
def test_float32_statistics_keep_v_orthonormal(smallest):
    rng = np.random.default_rng(1)
    U = np.linalg.qr(rng.standard_normal((8, 8)))[0]
    V = np.linalg.qr(rng.standard_normal((30, 8)))[0]
    H = torch.from_numpy(U * np.geomspace(1.0, smallest, 8) @ V.T).to(torch.float32)
    (kept, sigma), _ = summarise(H, 8)
    np.testing.assert_allclose((kept.T @ kept).numpy(), np.eye(len(sigma)), atol=1e-5)
