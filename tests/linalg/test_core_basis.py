"""The leading directions of activations outside a known space (FedProTIP Eq. 6-8)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fcl_bench.methods.projection.subspace import core_basis
from tests.linalg.subspace_cases import (
    DTYPES,
    NOISE,
    activations,
    array,
    assert_orthonormal,
    assert_same_span,
    orthonormal,
    seeds,
    tensor,
    thresholds,
)
from tests.methods import fedprotip_oracle as oracle


def agrees_with_the_oracle(A: np.ndarray, Phi: np.ndarray, threshold: float, dtype: torch.dtype) -> None:
    """Rank, singular values and span; skips draws in which rounding decides the rank or the span."""
    A_t, Phi_t = tensor(A, dtype), tensor(Phi, dtype)
    eps, noise = float(torch.finfo(dtype).eps), NOISE[dtype]
    A, Phi = array(A_t), array(Phi_t)
    sigma = oracle.remaining_singular_values(A, Phi, eps)
    expected, kept = oracle.core_basis(A, Phi, threshold, eps)
    r, scale = len(kept), np.linalg.norm(A, 2) if A.size else 0.0
    uncut = oracle.remaining_singular_values(A, Phi, 0.0)
    # Neither clearly there nor clearly rounding: the oracle's cut and ours may differ.
    assume(not np.any((uncut > 10 * eps * scale) & (uncut < 100 * noise * scale)))
    if r and threshold < 1:
        assume(np.min(np.abs(np.cumsum(sigma) / np.sum(sigma) - threshold)) > 100 * eps * scale / sigma[0] + noise)
    U, values = core_basis(A_t, Phi_t, threshold)
    assert U.dtype == values.dtype == dtype
    assert U.shape == (len(A), r)
    assert values.shape == (r,)
    assert_orthonormal(U, Phi_t)
    np.testing.assert_allclose(array(values), kept, atol=noise * scale)
    gap = kept[-1] - (sigma[r] if r < len(sigma) else 0.0) if r else np.inf
    if r and gap > 1e-3 * scale:
        assert_same_span(U, expected, atol=noise * scale / gap)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 30), st.integers(0, 40), st.integers(0, 30), st.integers(0, 30), thresholds, seeds)
def test_a_core_basis_is_the_oracles(d, m, q, rank, threshold, seed):
    rng = np.random.default_rng(seed)
    agrees_with_the_oracle(activations(rng, d, m, rank), orthonormal(rng, d, q), threshold, torch.float64)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(0, 40), st.integers(0, 30), st.integers(0, 30), thresholds, seeds)
def test_a_core_basis_is_the_oracles_in_float32(d, m, q, rank, threshold, seed):
    rng = np.random.default_rng(seed)
    agrees_with_the_oracle(activations(rng, d, m, rank), orthonormal(rng, d, q), threshold, torch.float32)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 25), st.integers(1, 40), st.integers(0, 25), thresholds, seeds)
def test_the_basis_of_generic_activations_is_the_oracles(d, m, q, threshold, seed):
    rng = np.random.default_rng(seed)
    agrees_with_the_oracle(rng.standard_normal((d, m)), orthonormal(rng, d, q), threshold, torch.float64)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 20), thresholds, seeds)
def test_it_holds_the_threshold_and_one_rank_fewer_does_not(d, m, q, threshold, seed):
    """Against all singular values, not only the kept ones."""
    rng = np.random.default_rng(seed)
    A, Phi = rng.standard_normal((d, m)), orthonormal(rng, d, q)
    everything = oracle.remaining_singular_values(A, Phi)
    U, sigma = core_basis(tensor(A), tensor(Phi), threshold)
    if not everything.any():
        assert U.shape[1] == 0
        return
    mass = np.cumsum(array(sigma)) / np.sum(everything)
    assert len(mass) >= 1
    assert mass[-1] >= threshold - 1e-9
    assert len(mass) == 1 or mass[-2] < threshold + 1e-9
    # The kept values are those of the part of A in U.
    np.testing.assert_allclose(np.linalg.svd(array(U).T @ A, compute_uv=False)[: len(sigma)], sigma, atol=1e-9)


@pytest.mark.parametrize(
    ("threshold", "rank"), [(1e-12, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.89, 3), (0.91, 4), (1.0, 4)]
)
def test_the_fraction_is_of_the_sum_not_of_the_energy(threshold, rank):
    """4 + 3 + 2 + 1 = 10; the energies 16, 9, 4, 1 (of 30) would keep fewer."""
    rng = np.random.default_rng(0)
    A = tensor(orthonormal(rng, 9, 4) * np.array([4.0, 3, 2, 1]) @ orthonormal(rng, 6, 4).T)
    U, sigma = core_basis(A, torch.zeros(9, 0, dtype=torch.float64), threshold)
    assert U.shape == (9, rank)
    np.testing.assert_allclose(sigma, [4.0, 3, 2, 1][:rank])


def test_exactly_the_threshold_is_enough():
    A = torch.diag(torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64))
    Phi = torch.zeros(3, 0, dtype=torch.float64)
    assert core_basis(A, Phi, 0.5)[0].shape == (3, 1)
    assert core_basis(A, Phi, 0.75)[0].shape == (3, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("d", "m", "rank"), [(20, 50, 7), (50, 20, 7), (20, 50, 20), (50, 20, 20), (12, 1, 1)])
def test_threshold_one_keeps_the_whole_range_and_no_rounding(d, m, rank, dtype):
    A = activations(np.random.default_rng(d), d, m, rank)
    U, sigma = core_basis(tensor(A, dtype), torch.zeros(d, 0, dtype=dtype), 1.0)
    assert_orthonormal(U)
    assert_same_span(U, oracle.span(A), atol=100 * NOISE[dtype])
    assert (sigma > 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threshold", [1e-9, 0.7, 1.0])
@pytest.mark.parametrize(("d", "m", "q"), [(15, 30, 5), (30, 15, 5), (15, 30, 15), (15, 1, 3), (200, 300, 120)])
def test_activations_inside_the_known_space_leave_nothing(d, m, q, threshold, dtype):
    rng = np.random.default_rng(q)
    Phi = orthonormal(rng, d, q)
    for scale in (1e-3, 1.0, 1e4):
        A = scale * Phi @ rng.standard_normal((q, m))
        U, sigma = core_basis(tensor(A, dtype), tensor(Phi, dtype), threshold)
        assert U.shape == (d, 0)
        assert sigma.shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q", [0, 2, 6])
def test_no_columns_or_zero_columns_leave_nothing(q, dtype):
    Phi = tensor(orthonormal(np.random.default_rng(0), 6, q), dtype)
    for A in (torch.zeros(6, 0, dtype=dtype), torch.zeros(6, 4, dtype=dtype)):
        U, sigma = core_basis(A, Phi, 0.7)
        assert U.shape == (6, 0)
        assert sigma.shape == (0,)
        assert U.dtype == sigma.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_known_space_of_everything_leaves_nothing(dtype):
    rng = np.random.default_rng(1)
    Phi = tensor(orthonormal(rng, 12, 12), dtype)
    assert core_basis(tensor(rng.standard_normal((12, 30)), dtype), Phi, 1.0)[0].shape == (12, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_column_is_its_own_direction(dtype):
    a = tensor(np.random.default_rng(2).standard_normal((9, 1)), dtype)
    U, sigma = core_basis(a, torch.zeros(9, 0, dtype=dtype), 0.7)
    assert_same_span(U, array(a / a.norm()), atol=NOISE[dtype])
    np.testing.assert_allclose(array(sigma), array(a.norm()), rtol=1e-6)


def test_repeated_columns_change_the_values_not_the_span():
    rng = np.random.default_rng(3)
    A, Phi = activations(rng, 20, 8, 5), orthonormal(rng, 20, 4)
    U, sigma = core_basis(tensor(A), tensor(Phi), 1.0)
    V, larger = core_basis(tensor(np.tile(A, 4)), tensor(Phi), 1.0)
    assert_same_span(V, array(U), atol=1e-9)
    np.testing.assert_allclose(larger, 2 * sigma, rtol=1e-9)
    assert core_basis(tensor(np.tile(A[:, :1], 30)), tensor(Phi), 1.0)[0].shape == (20, 1)


def test_equal_singular_values_are_counted_one_by_one():
    A = torch.eye(8, dtype=torch.float64)[:, :6]
    for threshold, rank in ((0.1, 1), (0.4, 3), (0.6, 4), (0.9, 6), (1.0, 6)):
        U, sigma = core_basis(A, torch.zeros(8, 0, dtype=torch.float64), threshold)
        assert U.shape == (8, rank)
        assert_orthonormal(U)
        np.testing.assert_allclose(sigma, 1)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 1e-3), (torch.float64, 1e-7), (torch.float32, 1e-3)])
def test_a_faint_remainder_is_still_orthogonal_to_the_known_space(dtype, size):
    """Late tasks: nearly everything is known, and subtracting it must not leave a trace of it in U."""
    rng = np.random.default_rng(4)
    Q = orthonormal(rng, 60, 45)
    Phi, outside = Q[:, :40], Q[:, 40:]
    A = Phi @ rng.standard_normal((40, 80)) + size * outside @ rng.standard_normal((5, 80))
    Phi_t = tensor(Phi, dtype)
    U, sigma = core_basis(tensor(A, dtype), Phi_t, 1.0)
    assert U.shape == (60, 5)
    assert_orthonormal(U, Phi_t)
    assert_same_span(U, outside, atol=100 * float(torch.finfo(dtype).eps) / size)
    assert (sigma > size).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exponent", [-40, -10, 10, 40])
def test_the_scale_of_the_activations_does_not_matter(exponent, dtype):
    rng = np.random.default_rng(5)
    A, Phi = tensor(activations(rng, 20, 30, 12), dtype), tensor(orthonormal(rng, 20, 5), dtype)
    U, sigma = core_basis(A, Phi, 0.8)
    V, scaled = core_basis(A * 2.0**exponent, Phi, 0.8)
    assert_same_span(V, array(U), atol=10 * NOISE[dtype])
    torch.testing.assert_close(scaled * 2.0**-exponent, sigma)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 20), st.integers(2, 30), st.integers(0, 10), seeds)
def test_the_order_of_the_columns_does_not_matter(d, m, q, seed):
    rng = np.random.default_rng(seed)
    A, Phi = tensor(rng.standard_normal((d, m))), tensor(orthonormal(rng, d, q))
    U, sigma = core_basis(A, Phi, 1.0)
    V, again = core_basis(A[:, torch.from_numpy(rng.permutation(m))], Phi, 1.0)
    assume(len(sigma) == 0 or sigma[-1] > 1e-3)
    assert_same_span(V, array(U), atol=1e-9)
    np.testing.assert_allclose(again, sigma, atol=1e-9)


@pytest.mark.slow
def test_a_whole_layer_in_float32():
    """The size of a residual block's convolution; Phi is as orthonormal as float32 has it."""
    rng = np.random.default_rng(6)
    Phi = tensor(orthonormal(rng, 1152, 300), torch.float32)
    A = tensor(np.maximum(activations(rng, 1152, 512, 512) * 30 + 0.01 * rng.standard_normal((1152, 512)), 0))
    U, sigma = core_basis(A.to(torch.float32), Phi, 0.7)
    expected = oracle.remaining_singular_values(array(A), array(Phi))
    assert_orthonormal(U, Phi)
    assert abs(U.shape[1] - oracle.core_rank(expected, 0.7)) <= 1
    np.testing.assert_allclose(array(sigma), expected[: len(sigma)], atol=1e-4 * expected[0])
