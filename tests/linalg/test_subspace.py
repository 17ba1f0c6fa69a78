"""Feature subspaces against a plain NumPy oracle: patches, core bases, their union, projection and sketches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from fcl_bench.linalg.subspace import append_basis, core_basis, gather_columns, project_out, sketch, span_of
from tests.methods import fedprotip_oracle as oracle

DTYPES = [torch.float64, torch.float32]
NOISE = {torch.float64: 1e-9, torch.float32: 1e-4}  # agreement of two ways to compute the same
ORTHONORMAL = {torch.float64: 1e-10, torch.float32: 1e-5}
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}  # what the bases are told to drop

seeds = st.integers(0, 10**6)
thresholds = st.one_of(st.floats(0.01, 0.99), st.sampled_from([1.0, 1e-9, 0.7, 0.9]))


def orthonormal(rng, d: int, q: int) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((d, min(q, d))))[0]


def activations(rng, d: int, m: int, rank: int) -> np.ndarray:
    """A (d, m) of that rank (at most), its singular values spread over about two decades."""
    rank = min(rank, d, m)
    return orthonormal(rng, d, rank) * np.geomspace(1, 0.01, rank or 1)[:rank] @ orthonormal(rng, m, rank).T


def tensor(array: np.ndarray, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(np.ascontiguousarray(array), dtype=dtype)


def array(t: torch.Tensor) -> np.ndarray:
    return t.to(torch.float64).numpy()


def assert_orthonormal(U: torch.Tensor, *others: torch.Tensor) -> None:
    atol = ORTHONORMAL[U.dtype]
    np.testing.assert_allclose(array(U.T @ U), np.eye(U.shape[1]), atol=atol)
    for Phi in others:
        np.testing.assert_allclose(array(Phi.T @ U), 0, atol=atol)


def assert_same_span(U: torch.Tensor, V: np.ndarray, atol: float) -> None:
    assert U.shape == V.shape
    np.testing.assert_allclose(oracle.projector(array(U)), oracle.projector(V), atol=atol)


# gather_columns -------------------------------------------------------------------------------------------------------

CONVOLUTIONS = {
    "1x1": {"kernel_size": 1},
    "1x1 stride 2": {"kernel_size": 1, "stride": 2},
    "1x1 stride 3 padded": {"kernel_size": 1, "stride": 3, "padding": 1},
    "3x3": {"kernel_size": 3, "padding": 1},
    "3x3 valid": {"kernel_size": 3},
    "3x3 stride 2": {"kernel_size": 3, "stride": 2, "padding": 1},
    "3x3 stride 4 (gaps)": {"kernel_size": 3, "stride": 4},
    "3x3 dilated": {"kernel_size": 3, "dilation": 2, "padding": 2},
    "2x2 dilated stride 2": {"kernel_size": 2, "dilation": 3, "stride": 2},
    "7x7 stem": {"kernel_size": 7, "stride": 2, "padding": 3},
    "padding beyond the kernel": {"kernel_size": 2, "padding": 2},
    "rectangular": {"kernel_size": (3, 2), "stride": (2, 1), "padding": (0, 1), "dilation": (1, 2)},
    "a row": {"kernel_size": (1, 5), "padding": (0, 2)},
}
IMAGES = [(7, 9), (8, 8), (9, 7)]


@pytest.mark.parametrize("size", IMAGES, ids=str)
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_every_patch_is_the_one_unfold_gives(options, size):
    layer = nn.Conv2d(3, 4, **options)
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    columns = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    places = columns.shape[2]
    sample = torch.arange(2).repeat_interleave(places)
    place = torch.arange(places).repeat(2)
    gathered = gather_columns(x, layer, sample, place)
    assert gathered.dtype == x.dtype
    assert torch.equal(gathered, torch.cat([columns[0], columns[1]], dim=1))
    expected = [
        oracle.unfold(array(image), layer.kernel_size, layer.stride, layer.padding, layer.dilation) for image in x
    ]
    np.testing.assert_array_equal(array(gathered), np.concatenate(expected, axis=1))


@settings(max_examples=80, deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(3, 11), st.integers(3, 11)),
    st.tuples(st.integers(0, 20), seeds),
)
def test_drawn_patches_are_the_ones_unfold_gives(kernel, stride, padding, dilation, shape, drawn):
    m, seed = drawn
    spans = zip(shape[2:], kernel, padding, dilation, strict=True)
    assume(all(size + 2 * p > e * (k - 1) for size, k, p, e in spans))
    layer = nn.Conv2d(shape[1], 2, kernel, stride, padding, dilation, dtype=torch.float64)
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64, generator=rng)
    columns = F.unfold(x, kernel, dilation, padding, stride)
    sample = torch.randint(shape[0], (m,), generator=rng)
    place = torch.randint(columns.shape[2], (m,), generator=rng)
    gathered = gather_columns(x, layer, sample, place)
    assert gathered.shape == (columns.shape[1], m)
    assert torch.equal(gathered, columns[sample, :, place].T)


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_the_weight_times_the_columns_is_the_layers_output(options):
    layer = nn.Conv2d(3, 4, **options, bias=False, dtype=torch.float64)
    x = torch.randn(3, 3, 8, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    output = layer(x).detach().flatten(2)
    sample = torch.tensor([0, 2, 2, 1, 0, 2])
    place = torch.tensor([0, output.shape[2] - 1, 1, output.shape[2] // 2, 0, 0])
    columns = gather_columns(x, layer, sample, place)
    torch.testing.assert_close(layer.weight.detach().flatten(1) @ columns, output[sample, :, place].T)


def test_inputs_that_are_not_contiguous_give_the_same_patches():
    layer = nn.Conv2d(3, 4, 3, padding=1, stride=2)
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    sample, place = torch.tensor([1, 0, 1]), torch.tensor([0, 15, 7])
    expected = gather_columns(x, layer, sample, place)
    assert torch.equal(gather_columns(x.to(memory_format=torch.channels_last), layer, sample, place), expected)
    assert torch.equal(gather_columns(x.transpose(2, 3).contiguous().transpose(2, 3), layer, sample, place), expected)


# core_basis -----------------------------------------------------------------------------------------------------------


def agrees_with_the_oracle(A: np.ndarray, Phi: np.ndarray, threshold: float, dtype: torch.dtype) -> None:
    """Rank, singular values and span; skips draws in which rounding decides the rank or the span."""
    A_t, Phi_t = tensor(A, dtype), tensor(Phi, dtype)
    eps, noise = float(torch.finfo(dtype).eps), NOISE[dtype]
    A, Phi = array(A_t), array(Phi_t)
    sigma = oracle.remaining_singular_values(A, Phi, eps)
    expected, kept = oracle.core_basis(A, Phi, threshold, eps)
    r, scale = len(kept), np.linalg.norm(A, 2) if A.size else 0.0
    assume(not np.any((sigma > 0) & (sigma < 100 * noise * scale)))  # neither clearly there nor clearly rounding
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


@settings(max_examples=150, deadline=None)
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


# append_basis ---------------------------------------------------------------------------------------------------------


def client_bases(rng, d: int, ranks: list[int], shared: int) -> list[np.ndarray]:
    """Bases that have some directions in common, each client's rotated its own way."""
    pool = orthonormal(rng, d, shared)
    bases = []
    for r in ranks:
        own = orthonormal(rng, d, r)
        n = min(shared, r // 2, d)
        chosen = pool[:, rng.permutation(pool.shape[1])[:n]]
        basis = np.linalg.qr(np.concatenate([chosen, own[:, : r - n]], axis=1))[0] if r else own
        bases.append(basis @ orthonormal(rng, basis.shape[1], basis.shape[1]) if basis.shape[1] else basis)
    return bases


def well_separated(bases: list[np.ndarray], d: int, dtype: torch.dtype = torch.float64) -> bool:
    """No direction is nearly, but not quite, in the span of the others."""
    stacked = np.concatenate(bases, axis=1)
    sigma = np.linalg.svd(stacked, compute_uv=False) if stacked.size else np.zeros(0)
    return not np.any((sigma > 1e-12) & (sigma < 100 * TOLERANCE[dtype]))


def aggregate(bases: list[np.ndarray], Phi: torch.Tensor, tolerance: float) -> torch.Tensor:
    for U in bases:
        Phi = append_basis(Phi, tensor(U, Phi.dtype), tolerance)
    return Phi


ranks = st.lists(st.integers(0, 12), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=60, deadline=None)
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


# project_out ----------------------------------------------------------------------------------------------------------


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


def softmax_problem(seed: int, d: int = 12, classes: int = 5, batches: int = 8):
    rng = np.random.default_rng(seed)
    W, Phi = rng.standard_normal((classes, d)), orthonormal(rng, d, 5)
    data = [(rng.standard_normal((6, d)), rng.integers(classes, size=6)) for _ in range(batches)]
    return W, Phi, data


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("weight_decay", "momentum"), [(0.0, 0.0), (5e-4, 0.0), (0.1, 0.0), (5e-4, 0.9), (0.1, 0.9)])
def test_projected_local_training_is_the_oracles(weight_decay, momentum, dtype):
    """An ordinary SGD whose applied step is projected (erratum 3): weights, and the invariant on the weights."""
    W0, Phi, data = softmax_problem(0)
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


# sketch, span_of ------------------------------------------------------------------------------------------------------


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_sketch_is_weighted_gaussian():
    """Eq. 40: undoing U and sigma leaves independent standard normal numbers."""
    U, sigma = orthonormal(np.random.default_rng(0), 7, 3), np.array([5.0, 1.0, 0.2])
    B = sketch(tensor(U), tensor(sigma), 20000, generator(0))
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
    first, second = sketch(U, sigma, 5, rng), sketch(U, sigma, 5, rng)
    assert first.dtype == dtype
    assert torch.equal(first, sketch(U, sigma, 5, generator(1)))
    assert not torch.equal(first, second)
    assert not torch.equal(first, sketch(U, sigma, 5, generator(2)))


def test_a_client_without_a_basis_sends_zeros():
    B = sketch(torch.zeros(6, 0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64), 4, generator(0))
    assert torch.equal(B, torch.zeros(6, 4, dtype=torch.float64))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 25), st.integers(0, 12), st.integers(3, 10), st.sampled_from(DTYPES), seeds)
def test_a_sketch_with_enough_columns_spans_its_basis(d, r, more, dtype, seed):
    rng = np.random.default_rng(seed)
    U = orthonormal(rng, d, r)
    sigma = np.geomspace(1, 0.1, r or 1)[: U.shape[1]]
    B = sketch(tensor(U, dtype), tensor(sigma, dtype), U.shape[1] + more, generator(seed))
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
    B = sum(sketch(tensor(U), torch.linspace(2, 1, U.shape[1], dtype=torch.float64), columns, draws) for U in bases)
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


# Everything -----------------------------------------------------------------------------------------------------------


def test_no_function_writes_to_its_arguments():
    rng = np.random.default_rng(6)
    A, Phi = tensor(rng.standard_normal((8, 10))), tensor(orthonormal(rng, 8, 3))
    U, sigma = core_basis(A, Phi, 0.7)
    kept = [t.clone() for t in (A, Phi, U, sigma)]
    core_basis(A, Phi, 0.7)
    append_basis(Phi, U, 1e-8)
    project_out(A.T, Phi)
    sketch(U, sigma, 5, generator(0))
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
    B = sketch(U_there, sigma_there, U.shape[1] + 5, torch.Generator("cuda").manual_seed(0))
    assert_same_span(span_of(B, TOLERANCE[dtype]).cpu(), array(U), atol=100 * noise)
    layer = nn.Conv2d(3, 4, 3, stride=2, padding=1, dtype=dtype)
    x = torch.randn(2, 3, 9, 9, dtype=dtype, generator=generator(0))
    sample, place = torch.tensor([0, 1, 1]), torch.tensor([0, 24, 7])
    columns = gather_columns(x.cuda(), layer.cuda(), sample.cuda(), place.cuda())
    assert torch.equal(columns.cpu(), gather_columns(x, layer.cpu(), sample, place))


# The oracle itself ----------------------------------------------------------------------------------------------------


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
    W, _, ((X, labels), *_) = softmax_problem(1)
    weight = tensor(W).requires_grad_()
    F.cross_entropy(tensor(X) @ weight.T, torch.from_numpy(labels)).backward()
    np.testing.assert_allclose(oracle.softmax_gradient(W, X, labels), weight.grad, atol=1e-12)
    # Only some classes compete: the same as a smaller head; the others get nothing.
    part = oracle.softmax_gradient(W, X, labels % 2 + 3, [3, 4])
    np.testing.assert_allclose(part[3:], oracle.softmax_gradient(W[3:], X, labels % 2), atol=1e-12)
    assert not part[:3].any()


def test_the_oracles_training_moves_only_outside_the_known_space():
    W, Phi, data = softmax_problem(2)
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
