"""Bases appended, and updates projected out of them (FedProTIP Eq. 2, 4, 9)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from fcl_bench.methods.projection.subspace import Projection, append_basis, core_basis, project_out
from fcl_bench.training.layer_inputs import gather_columns
from tests.linalg.subspace_cases import (
    DTYPES,
    NOISE,
    ORTHONORMAL,
    TOLERANCE,
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


def aggregate(bases: list[np.ndarray], Phi: torch.Tensor, tolerance: float) -> torch.Tensor:
    for U in bases:
        Phi = append_basis(Phi, tensor(U, Phi.dtype), tolerance)
    return Phi


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 25), ranks, st.integers(0, 8), st.integers(0, 10), seeds)
def test_the_servers_basis_spans_the_union_of_the_clients(d, ranks, shared, q, seed):
    """Proposition 1, beside what is already known."""
    rng = np.random.default_rng(seed)
    bases, Phi = client_bases(rng, d, ranks, shared), orthonormal(rng, d, q)
    assume(well_separated([Phi, *bases], d))
    result = aggregate(bases, tensor(Phi), TOLERANCE[torch.float64])
    assert_orthonormal(result)
    assert torch.equal(result[:, : Phi.shape[1]], tensor(Phi))
    assert_same_span(result, oracle.union([Phi, *bases]), atol=1e-9)
    expected = Phi
    for U in bases:
        expected = oracle.append(expected, U)
    assert_same_span(result, expected, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 25), ranks, st.integers(0, 8), st.sampled_from(DTYPES), seeds)
def test_the_order_of_the_clients_does_not_matter(d, ranks, shared, dtype, seed):
    rng = np.random.default_rng(seed)
    bases = client_bases(rng, d, ranks, shared)
    assume(well_separated(bases, d, dtype))
    empty = torch.zeros(d, 0, dtype=dtype)
    one = aggregate(bases, empty, TOLERANCE[dtype])
    other = aggregate([bases[k] for k in rng.permutation(len(bases))], empty, TOLERANCE[dtype])
    assert_orthonormal(one)
    assert_same_span(other, array(one), atol=NOISE[dtype] if dtype == torch.float64 else 2e-4)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 25), st.integers(0, 25), st.integers(0, 25), st.sampled_from(DTYPES), seeds)
def test_the_known_columns_stay_bit_for_bit(d, q, r, dtype, seed):
    rng = np.random.default_rng(seed)
    Phi, U = tensor(orthonormal(rng, d, q), dtype), tensor(orthonormal(rng, d, r), dtype)
    before = Phi.clone(), U.clone()
    result = append_basis(Phi, U, TOLERANCE[dtype])
    assert torch.equal(result[:, : Phi.shape[1]], before[0])
    assert torch.equal(Phi, before[0])
    assert torch.equal(U, before[1])
    assert result.dtype == dtype
    assert result.shape[1] <= d
    # What is appended twice adds nothing.
    assert torch.equal(append_basis(result, U, TOLERANCE[dtype]), result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_new_returns_the_known_basis(dtype):
    rng = np.random.default_rng(0)
    Phi, tolerance = orthonormal(rng, 12, 7), TOLERANCE[dtype]
    inside = Phi @ orthonormal(rng, 7, 4)
    full = orthonormal(rng, 12, 12)
    for known, U in (
        (Phi, inside),
        (Phi, Phi),
        (Phi, -Phi[:, ::-1]),
        (Phi, Phi[:, :0]),
        (full, Phi),
        (full, orthonormal(rng, 12, 12)),
        (full[:, :0], full[:, :0]),
    ):
        result = append_basis(tensor(known, dtype), tensor(U, dtype), tolerance)
        assert torch.equal(result, tensor(known, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_empty_basis_takes_all_of_the_first_client(dtype):
    U = orthonormal(np.random.default_rng(1), 10, 6)
    result = append_basis(torch.zeros(10, 0, dtype=dtype), tensor(U, dtype), TOLERANCE[dtype])
    assert_orthonormal(result)
    assert_same_span(result, U, atol=NOISE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_repeated_columns_are_taken_once(dtype):
    rng = np.random.default_rng(2)
    Phi, U = orthonormal(rng, 10, 2), orthonormal(rng, 10, 3)
    result = append_basis(tensor(Phi, dtype), tensor(np.concatenate([U, U], axis=1), dtype), TOLERANCE[dtype])
    assert_orthonormal(result)
    assert_same_span(result, oracle.union([Phi, U]), atol=NOISE[dtype])


def test_two_new_columns_with_one_remainder_give_one_direction():
    """Each has a large part outside Phi, the same one: judging them separately would append it twice."""
    e = np.eye(5)
    Phi, s = e[:, :2], np.sqrt(0.5)
    U = np.stack([s * e[0] + s * e[2], s * e[1] + s * e[2]], axis=1)
    result = append_basis(tensor(Phi), tensor(U), 1e-8)
    assert_same_span(result, e[:, :3], atol=1e-12)


@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-6])
def test_a_direction_is_dropped_below_the_tolerance_and_kept_above(size):
    rng = np.random.default_rng(3)
    Q = orthonormal(rng, 12, 12)
    Phi, x, y = Q[:, :4], Q[:, 4], Q[:, 5]
    faint = np.sqrt(1 - size**2) * Phi[:, 0] + size * x
    for U in (faint[:, None], np.stack([faint, y], axis=1), np.stack([y, faint], axis=1)):
        kept = append_basis(tensor(Phi), tensor(U), size / 10)
        assert_orthonormal(kept)
        assert_same_span(kept, oracle.union([Phi, x[:, None], *([y[:, None]] if U.shape[1] == 2 else [])]), atol=1e-8)
        dropped = append_basis(tensor(Phi), tensor(U), size * 10)
        assert_same_span(dropped, oracle.union([Phi, *([y[:, None]] if U.shape[1] == 2 else [])]), atol=1e-8)
    # The same two directions in another basis: what counts is the span.
    rotated = np.stack([faint, y], axis=1) @ orthonormal(rng, 2, 2)
    assert append_basis(tensor(Phi), tensor(rotated), size / 10).shape[1] == 6
    assert append_basis(tensor(Phi), tensor(rotated), size * 10).shape[1] == 5


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 20), st.integers(0, 10), st.integers(1, 10), seeds)
def test_a_rotation_of_the_uploaded_basis_does_not_matter(d, q, r, seed):
    rng = np.random.default_rng(seed)
    Phi, U = orthonormal(rng, d, q), orthonormal(rng, d, r)
    assume(well_separated([Phi, U], d))
    one = append_basis(tensor(Phi), tensor(U), 1e-8)
    other = append_basis(tensor(Phi), tensor(U @ orthonormal(rng, U.shape[1], U.shape[1])), 1e-8)
    assert_same_span(other, array(one), atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ten_tasks_of_five_clients_stay_orthonormal(dtype):
    """The whole chain: core bases against what is known, then the union; nothing drifts."""
    rng = np.random.default_rng(4)
    Phi = torch.zeros(64, 0, dtype=dtype)
    for _ in range(10):
        subspace = orthonormal(rng, 64, 12)
        bases = []
        for _ in range(5):
            A = tensor(subspace @ np.maximum(rng.standard_normal((12, 40)), 0), dtype)
            bases.append((A, core_basis(A, Phi, 0.9)[0]))
        for A, U in bases:
            Phi = append_basis(Phi, U, TOLERANCE[dtype])
            mass = np.linalg.svd(array(A), compute_uv=False).sum()
            left = np.linalg.svd(oracle.complement(array(Phi)) @ array(A), compute_uv=False).sum()
            assert left <= 0.1 * mass * (1 + 1e-5)
        assert_orthonormal(Phi)
    assert Phi.shape[1] == 64


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 8), st.integers(1, 30), st.integers(0, 30), st.sampled_from(DTYPES), seeds)
def test_projecting_out_is_the_oracles_and_once_is_enough(out, d, q, dtype, seed):
    rng = np.random.default_rng(seed)
    delta, Phi = tensor(rng.standard_normal((out, d)), dtype), tensor(orthonormal(rng, d, q), dtype)
    before = delta.clone()
    result = project_out(delta, Phi)
    noise = NOISE[dtype] if dtype == torch.float64 else 1e-5
    assert result.dtype == dtype
    assert torch.equal(delta, before)
    np.testing.assert_allclose(array(result), array(delta) @ oracle.complement(array(Phi)), atol=noise)
    np.testing.assert_allclose(array(result @ Phi), 0, atol=noise)
    np.testing.assert_allclose(array(project_out(result, Phi)), array(result), atol=noise)
    assert (result.norm(dim=1) <= delta.norm(dim=1) * (1 + noise)).all()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(4, 3, 2, 2), (4, 6, 1, 1), (5, 1, 3, 4), (4, 12), (1, 12)]),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from(DTYPES),
    seeds,
)
def test_the_projection_of_many_updates_is_the_oracles_in_place(shape, share, channels_last, dtype, seed):
    """With few and with most directions protected, and in both layouts of a convolution's weight."""
    rng = np.random.default_rng(seed)
    layout = torch.channels_last if channels_last and len(shape) == 4 else torch.contiguous_format
    weight = torch.empty(shape, dtype=dtype).to(memory_format=layout)
    d = weight[0].numel()
    Phi = orthonormal(rng, d, round(share * d))
    project = Projection(tensor(Phi, dtype), weight)
    noise = NOISE[dtype] if dtype == torch.float64 else 1e-5
    for _ in range(2):
        update = rng.standard_normal(shape)
        changed = torch.empty_like(weight).copy_(tensor(update, dtype))
        project(changed)
        expected = update.reshape(shape[0], d) @ oracle.complement(Phi)
        np.testing.assert_allclose(array(changed.reshape(shape[0], d)), expected, atol=noise)


def test_a_projection_refuses_an_update_in_another_layout():
    weight = torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last)
    project = Projection(torch.zeros(12, 0), weight)
    with pytest.raises(ValueError, match="memory layout"):
        project(torch.ones(4, 3, 2, 2))


@pytest.mark.parametrize("shape", [(4, 3, 2, 2), (4, 3, 1, 1), (4, 12), (1, 12), (5, 2, 3, 4)])
def test_a_convolutions_update_keeps_its_shape(shape):
    rng = np.random.default_rng(0)
    delta = rng.standard_normal(shape)
    Phi = orthonormal(rng, delta[0].size, 2)
    result = project_out(tensor(delta), tensor(Phi))
    assert result.shape == shape
    expected = delta.reshape(shape[0], -1) @ oracle.complement(Phi)
    np.testing.assert_allclose(result.reshape(shape[0], -1), expected, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_basis_changes_nothing_and_a_full_one_leaves_nothing(dtype):
    rng = np.random.default_rng(1)
    delta = tensor(rng.standard_normal((5, 3, 2, 2)), dtype)
    assert torch.equal(project_out(delta, torch.zeros(12, 0, dtype=dtype)), delta)
    left = project_out(delta, tensor(orthonormal(rng, 12, 12), dtype))
    assert left.norm() <= ORTHONORMAL[dtype] * delta.norm()


def test_a_projected_convolution_answers_known_inputs_as_before():
    """Eq. 3: a layer whose update is orthogonal to the patches of an input gives the same output on it."""
    rng = torch.Generator().manual_seed(0)
    layer = nn.Conv2d(3, 4, 3, padding=1, stride=2, bias=False, dtype=torch.float64)
    x = torch.randn(1, 3, 6, 6, dtype=torch.float64, generator=rng)
    places = torch.arange(9)
    A = gather_columns(x, layer, torch.zeros(9, dtype=torch.int64), places)
    Phi = append_basis(torch.zeros(27, 0, dtype=torch.float64), core_basis(A, A[:, :0], 1.0)[0], 1e-8)
    before = layer(x).detach()
    update = torch.randn(layer.weight.shape, dtype=torch.float64, generator=rng)
    with torch.no_grad():
        layer.weight += project_out(update, Phi)
    torch.testing.assert_close(layer(x).detach(), before, rtol=0, atol=1e-12)
    with torch.no_grad():
        layer.weight += update - project_out(update, Phi)
    assert (layer(x).detach() - before).abs().max() > 0.1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("weight_decay", "momentum"), [(0.0, 0.0), (5e-4, 0.0), (0.1, 0.0), (5e-4, 0.9), (0.1, 0.9)])
def test_projected_local_training_is_the_oracles(weight_decay, momentum, dtype):
    """An ordinary SGD whose applied step is projected (erratum 3): weights, and the invariant on the weights."""
    W0, Phi, data = softmax_context(0)
    W = tensor(W0, dtype).requires_grad_()
    optimiser = torch.optim.SGD([W], lr=0.1, weight_decay=weight_decay, momentum=momentum)
    for X, labels in data:
        old = W.detach().clone()
        optimiser.zero_grad()
        F.cross_entropy(tensor(X, dtype) @ W.T, torch.from_numpy(labels)).backward()
        optimiser.step()
        with torch.no_grad():
            W.copy_(old + project_out(W.detach() - old, tensor(Phi, dtype)))
    expected = oracle.local_training(W0, data, Phi, 0.1, weight_decay, momentum)
    noise = NOISE[dtype] if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(array(W.detach()), expected, atol=noise)
    assert oracle.leak(array(W.detach()), W0, Phi) < noise
    if weight_decay:
        wrong = oracle.local_training_projecting_gradients_only(W0, data, Phi, 0.1, weight_decay, momentum)
        assert oracle.leak(wrong, W0, Phi) > 1e-4
