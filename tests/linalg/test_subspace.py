"""Gaussian sketches and their span (FedProTIP Eq. 40); what holds for every function; the oracle itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from fcl_bench.methods.projection.subspace import append_basis, core_basis, project_out, sketch, span_of
from fcl_bench.training.layer_inputs import gather_columns
from tests.linalg.subspace_cases import (
    DTYPES,
    NOISE,
    TOLERANCE,
    activations,
    array,
    assert_orthonormal,
    assert_same_span,
    client_bases,
    orthonormal,
    ranks,
    seeds,
    softmax_context,
    tensor,
    well_separated,
)
from tests.methods import fedprotip_oracle as oracle


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_sketch_is_weighted_gaussian():
    """Eq. 40: undoing U and sigma leaves independent standard normal numbers."""
    U, sigma = orthonormal(np.random.default_rng(0), 7, 3), np.array([5.0, 1.0, 0.2])
    B = sketch(tensor(U) * tensor(sigma), 20000, generator(0))
    assert B.shape == (7, 20000)
    np.testing.assert_allclose(array(B), oracle.projector(U) @ array(B), atol=1e-12)
    G = (U.T @ array(B)) / sigma[:, None]
    np.testing.assert_allclose(G.mean(axis=1), 0, atol=0.04)
    np.testing.assert_allclose(G @ G.T / G.shape[1], np.eye(3), atol=0.06)
    np.testing.assert_allclose((G**4).mean(axis=1), 3, atol=0.4)
    np.testing.assert_allclose(oracle.sketch(U, sigma, G), B, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sketch_is_its_generators(dtype):
    U, sigma = tensor(np.eye(6)[:, :4], dtype), torch.ones(4, dtype=dtype)
    rng = generator(1)
    first, second = sketch(U * sigma, 5, rng), sketch(U * sigma, 5, rng)
    assert first.dtype == dtype
    assert torch.equal(first, sketch(U * sigma, 5, generator(1)))
    assert not torch.equal(first, second)
    assert not torch.equal(first, sketch(U * sigma, 5, generator(2)))


def test_a_client_without_a_basis_sends_zeros():
    B = sketch(torch.zeros(6, 0, dtype=torch.float64), 4, generator(0))
    assert torch.equal(B, torch.zeros(6, 4, dtype=torch.float64))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 25), st.integers(0, 12), st.integers(3, 10), st.sampled_from(DTYPES), seeds)
def test_a_sketch_with_enough_columns_spans_its_basis(d, r, more, dtype, seed):
    rng = np.random.default_rng(seed)
    U = orthonormal(rng, d, r)
    sigma = np.geomspace(1, 0.1, r or 1)[: U.shape[1]]
    B = sketch(tensor(U, dtype) * tensor(sigma, dtype), U.shape[1] + more, generator(seed))
    found = np.linalg.svd(array(B), compute_uv=False)[: U.shape[1]]
    assume(U.shape[1] == 0 or found[-1] > 1e-2 * found[0])
    result = span_of(B, TOLERANCE[dtype])
    assert_orthonormal(result)
    assert_same_span(result, U, atol=10 * NOISE[dtype])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), ranks, st.integers(0, 6), seeds)
def test_the_sum_of_the_sketches_spans_the_union(d, ranks, shared, seed):
    """Eq. 40, property 3: the server sees only the sum over clients and finds what Eq. 9 would have found."""
    rng = np.random.default_rng(seed)
    bases, draws = client_bases(rng, d, ranks, shared), generator(seed)
    assume(well_separated(bases, d))
    columns = sum(U.shape[1] for U in bases) + 5
    B = sum(sketch(tensor(U) * torch.linspace(2, 1, U.shape[1], dtype=torch.float64), columns, draws) for U in bases)
    assert_same_span(span_of(B, 1e-8), oracle.union(bases), atol=1e-7)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 30), st.integers(0, 40), st.integers(0, 20), st.sampled_from(DTYPES), seeds)
def test_the_span_is_the_oracles(d, s, rank, dtype, seed):
    B = activations(np.random.default_rng(seed), d, s, rank)
    result = span_of(tensor(B, dtype), TOLERANCE[dtype])
    assert result.dtype == dtype
    assert_orthonormal(result)
    assert_same_span(result, oracle.span(B), atol=100 * NOISE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_spans_nothing(dtype):
    for B in (torch.zeros(6, 0, dtype=dtype), torch.zeros(6, 3, dtype=dtype)):
        result = span_of(B, 1e-6)
        assert result.shape == (6, 0)
        assert result.dtype == dtype


@pytest.mark.parametrize("scale", [2.0**-60, 1.0, 2.0**60])
def test_the_tolerance_is_relative_to_the_largest(scale):
    rng = np.random.default_rng(5)
    U, V = orthonormal(rng, 10, 3), orthonormal(rng, 7, 3)
    B = tensor(scale * U * np.array([1.0, 1e-3, 1e-6]) @ V.T)
    for tolerance, rank in ((1e-1, 1), (1e-4, 2), (1e-8, 3)):
        assert_same_span(span_of(B, tolerance), U[:, :rank], atol=1e-9)


def test_no_function_writes_to_its_arguments():
    rng = np.random.default_rng(6)
    A, Phi = tensor(rng.standard_normal((8, 10))), tensor(orthonormal(rng, 8, 3))
    U, sigma = core_basis(A, Phi, 0.7)
    kept = [t.clone() for t in (A, Phi, U, sigma)]
    core_basis(A, Phi, 0.7)
    append_basis(Phi, U, 1e-8)
    project_out(A.T, Phi)
    sketch(U * sigma, 5, generator(0))
    span_of(A, 1e-8)
    assert all(torch.equal(t, before) for t, before in zip((A, Phi, U, sigma), kept, strict=True))


def test_the_same_arguments_give_the_same_bits():
    rng = np.random.default_rng(7)
    A, Phi = tensor(rng.standard_normal((30, 50))), tensor(orthonormal(rng, 30, 9))
    for once, twice in zip(core_basis(A, Phi, 0.7), core_basis(A, Phi, 0.7), strict=True):
        assert torch.equal(once, twice)
    U = core_basis(A, Phi, 0.7)[0]
    assert torch.equal(append_basis(Phi, U, 1e-8), append_basis(Phi, U, 1e-8))
    assert torch.equal(span_of(A, 1e-8), span_of(A, 1e-8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_finds_the_same_spaces(dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rng = np.random.default_rng(8)
    A, Phi = tensor(activations(rng, 40, 60, 20), dtype), tensor(orthonormal(rng, 40, 8), dtype)
    there = A.cuda(), Phi.cuda()
    U, sigma = core_basis(A, Phi, 0.8)
    U_there, sigma_there = core_basis(*there, 0.8)
    assert U_there.device.type == sigma_there.device.type == "cuda"
    noise = 10 * NOISE[dtype]
    assert_same_span(U_there.cpu(), array(U), atol=noise)
    torch.testing.assert_close(sigma_there.cpu(), sigma, rtol=noise, atol=noise)
    grown = append_basis(there[1], U_there, TOLERANCE[dtype])
    assert torch.equal(grown[:, :8], there[1])
    assert_same_span(grown.cpu(), array(append_basis(Phi, U, TOLERANCE[dtype])), atol=noise)
    torch.testing.assert_close(project_out(there[0].T, there[1]).cpu(), project_out(A.T, Phi), rtol=noise, atol=noise)
    B = sketch(U_there * sigma_there, U.shape[1] + 5, torch.Generator().manual_seed(0))
    assert_same_span(span_of(B, TOLERANCE[dtype]).cpu(), array(U), atol=100 * noise)
    layer = nn.Conv2d(3, 4, 3, stride=2, padding=1, dtype=dtype)
    x = torch.randn(2, 3, 9, 9, dtype=dtype, generator=generator(0))
    sample, place = torch.tensor([0, 1, 1]), torch.tensor([0, 24, 7])
    columns = gather_columns(x.cuda(), layer.cuda(), sample.cuda(), place.cuda())
    assert torch.equal(columns.cpu(), gather_columns(x, layer.cpu(), sample, place))


def test_the_oracle_on_cases_done_by_hand():
    x = np.arange(1.0, 5.0).reshape(1, 2, 2)
    np.testing.assert_array_equal(oracle.unfold(x, 2, 1, 0), [[1], [2], [3], [4]])
    np.testing.assert_array_equal(oracle.unfold(x, 1, 2, 0), [[1]])
    np.testing.assert_array_equal(oracle.unfold(x, 2, 2, 1), [[0, 0, 0, 4], [0, 0, 3, 0], [0, 2, 0, 0], [1, 0, 0, 0]])
    e = np.eye(4)
    U, sigma = oracle.core_basis(np.diag([8.0, 3, 2, 1]), e[:, :1], 0.8)
    np.testing.assert_allclose(sigma, [3, 2])
    np.testing.assert_allclose(oracle.projector(U), np.diag([0, 1, 1, 0]))
    assert oracle.core_basis(np.diag([8.0, 0, 0, 0]), e[:, :1], 1.0)[0].shape == (4, 0)
    np.testing.assert_allclose(
        oracle.projector(oracle.union([e[:, :2], e[:, 1:3]])), oracle.projector(oracle.append(e[:, :2], e[:, 1:3]))
    )


def test_the_oracles_softmax_gradient_is_autograds():
    W, _, ((X, labels), *_) = softmax_context(1)
    weight = tensor(W).requires_grad_()
    F.cross_entropy(tensor(X) @ weight.T, torch.from_numpy(labels)).backward()
    np.testing.assert_allclose(oracle.softmax_gradient(W, X, labels), weight.grad, atol=1e-12)
    # Only some classes compete: the same as a smaller head; the others get nothing.
    part = oracle.softmax_gradient(W, X, labels % 2 + 3, [3, 4])
    np.testing.assert_allclose(part[3:], oracle.softmax_gradient(W[3:], X, labels % 2), atol=1e-12)
    assert not part[:3].any()


def test_the_oracles_training_moves_only_outside_the_known_space():
    W, Phi, data = softmax_context(2)
    clients = [data[:3], data[3:], []]
    trained = oracle.train_task(W, clients, Phi, 3, 0.1, 0.05, 0.9)
    assert oracle.leak(trained, W, Phi) < 1e-13
    assert np.linalg.norm(trained - W) > 0.1
    one_class = oracle.train_task(W, [data], Phi, 1, 0.1, 0.05, 0.9, [0, 1, 2, 3, 4][2:3])
    np.testing.assert_array_equal(np.delete(one_class, 2, axis=0), np.delete(W, 2, axis=0))
    # One client, one round, nothing known: plain gradient descent.
    step = oracle.train_task(W, [data[:1]], Phi[:, :0], 1, 0.1)
    np.testing.assert_allclose(step, W - 0.1 * oracle.softmax_gradient(W, *data[0]))
    # A known space of everything: nothing moves.
    np.testing.assert_allclose(oracle.train_task(W, clients, np.eye(12), 2, 0.1, 0.05, 0.9), W)
    np.testing.assert_allclose(oracle.fedavg([W, 5 * W, np.nan * W], [3, 1, 0]), 2 * W)


def test_the_oracles_assumptions_4_and_5():
    e = np.eye(3)
    layer = [np.array([[3.0, 4.0, 0.0]])]  # a fraction 16 / 25 of the energy outside the first axis
    assert oracle.rho([layer], [e[:, :1]]) == pytest.approx(0.64)
    assert oracle.beta([layer], [e[:, :1]]) == pytest.approx(0.8)
    flat = [np.array([[1.0, 0.0, 0.0]])]
    assert oracle.rho([layer, flat], [e[:, :1]]) == 0
    assert oracle.beta([layer, flat], [e[:, :1]]) == pytest.approx(0.8)
    assert oracle.rho([layer], [e[:, :0]]) == oracle.beta([layer], [e[:, :0]]) == 1
    assert oracle.rho([[0 * layer[0]]], [e]) == 1
    # Two layers count together; more known directions never leave more.
    assert oracle.rho([[layer[0], flat[0]]], [e[:, :1], e[:, :0]]) == pytest.approx(17 / 26)
    rng = np.random.default_rng(3)
    gradients = [[rng.standard_normal((4, 10))] for _ in range(5)]
    Q = orthonormal(rng, 10, 10)
    for estimate in (oracle.rho, oracle.beta):
        values = [estimate(gradients, [Q[:, :q]]) for q in range(11)]
        assert (np.diff(values) <= 1e-12).all()
        assert values[-1] == pytest.approx(0, abs=1e-12)
