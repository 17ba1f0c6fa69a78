"""Task identity: relevance of an input to each task's subspace, and the clients' vote, against a plain oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fcl_bench.methods.projection.subspace import append_basis, core_basis
from fcl_bench.methods.projection.task_identity import relevance, route
from tests.methods import fedprotip_oracle as oracle

DTYPES = [torch.float64, torch.float32]
NOISE = {torch.float64: 1e-9, torch.float32: 1e-5}

seeds = st.integers(0, 10**6)


def orthonormal(rng, d: int, q: int) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((d, min(q, d))))[0]


def tensor(values, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64)).to(dtype)


def array(t: torch.Tensor) -> np.ndarray:
    return t.to(torch.float64).numpy()


def routed(omega, references, known, dtype: torch.dtype = torch.float64) -> list[int]:
    result = route(tensor(omega, dtype), tensor(references, dtype), torch.from_numpy(np.asarray(known, dtype=bool)))
    assert result.dtype == torch.int64
    return result.tolist()


# relevance ------------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 12), st.integers(1, 20), st.lists(st.integers(0, 20), min_size=1, max_size=6),
    st.sampled_from(DTYPES), seeds,
)  # fmt: skip
def test_relevance_is_the_oracles(n, d, ranks, dtype, seed):
    rng = np.random.default_rng(seed)
    A = tensor(rng.standard_normal((n, d)), dtype)
    bases = [tensor(orthonormal(rng, d, r), dtype) for r in ranks]
    omega = relevance(A, bases)
    assert omega.shape == (n, len(ranks))
    assert omega.dtype == dtype
    np.testing.assert_allclose(array(omega), oracle.relevance(array(A), [array(U) for U in bases]), atol=NOISE[dtype])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 10), st.integers(2, 20), st.integers(1, 12), seeds)
def test_relevance_is_the_length_of_the_part_inside(n, d, r, seed):
    rng = np.random.default_rng(seed)
    Q = orthonormal(rng, d, d)
    r = min(r, d)
    A, U, rest = rng.standard_normal((n, d)), Q[:, :r], Q[:, r:]
    omega = array(relevance(tensor(A), [tensor(U), tensor(rest), tensor(Q)]))
    lengths = np.linalg.norm(A, axis=1)
    assert (omega >= 0).all()
    np.testing.assert_allclose(omega[:, 0] ** 2 + omega[:, 1] ** 2, lengths**2)
    np.testing.assert_allclose(omega[:, 2], lengths)
    # It belongs to the subspace, not to the basis; it grows with the input.
    rotated = U @ orthonormal(rng, r, r)
    np.testing.assert_allclose(relevance(tensor(A), [tensor(rotated)])[:, 0], omega[:, 0], atol=1e-12)
    np.testing.assert_allclose(relevance(tensor(-3 * A), [tensor(U)])[:, 0], 3 * omega[:, 0], atol=1e-12)
    # An input inside, one outside.
    np.testing.assert_allclose(relevance(tensor(A @ U @ U.T), [tensor(U)])[:, 0], omega[:, 0], atol=1e-12)
    np.testing.assert_allclose(relevance(tensor(A - A @ U @ U.T), [tensor(U)]), 0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_empty_basis_has_relevance_zero(dtype):
    A = torch.ones(3, 4, dtype=dtype)
    eye = torch.eye(4, dtype=dtype)
    omega = relevance(A, [eye[:, :0], eye[:, :1], eye[:, :0]])
    assert torch.equal(omega, torch.tensor([[0.0, 1.0, 0.0]] * 3, dtype=dtype))


def test_relevance_of_a_zero_input_is_zero():
    assert torch.equal(relevance(torch.zeros(2, 3), [torch.eye(3)]), torch.zeros(2, 1))


# route ----------------------------------------------------------------------------------------------------------------


def draw(rng, n: int, K: int, T: int, padded: bool):
    """Relevances, references and what each client knows; task 0 is known to someone."""
    omega, references = rng.random((n, T)), rng.random((K, T, T))
    known = rng.random((K, T)) < 0.7
    known[rng.integers(K), 0] = True
    if padded:  # recorded when task tau was the latest: nothing about later tasks
        references *= np.tril(np.ones((T, T)))
    return omega, references, known


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(1, 7), st.integers(1, 6), st.booleans(), st.sampled_from(DTYPES), seeds)
def test_a_route_is_the_oracles(n, K, T, padded, dtype, seed):
    omega, references, known = draw(np.random.default_rng(seed), n, K, T, padded)
    omega, references = (array(tensor(x, dtype)) for x in (omega, references))
    expected, margins = oracle.route(omega, references, known)
    clear = margins > NOISE[dtype]
    assume(clear.any())
    assert np.array(routed(omega, references, known, dtype))[clear].tolist() == expected[clear].tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 7), st.integers(1, 6), seeds)
def test_the_order_of_the_clients_does_not_matter(n, K, T, seed):
    rng = np.random.default_rng(seed)
    omega, references, known = draw(rng, n, K, T, padded=True)
    clear = oracle.route(omega, references, known)[1] > 1e-9
    order = rng.permutation(K)
    before = np.array(routed(omega, references, known))
    after = np.array(routed(omega, references[order], known[order]))
    assert before[clear].tolist() == after[clear].tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 7), st.integers(1, 6), st.integers(-60, 60), seeds)
def test_positive_scales_do_not_matter(n, K, T, exponent, seed):
    """Of each sample's relevance, and of each reference: only directions are compared."""
    rng = np.random.default_rng(seed)
    omega, references, known = draw(rng, n, K, T, padded=True)
    clear = oracle.route(omega, references, known)[1] > 1e-9
    before = np.array(routed(omega, references, known))[clear].tolist()
    assert np.array(routed(omega * 2.0**exponent, references, known))[clear].tolist() == before
    assert np.array(routed(omega, references * 2.0**exponent, known))[clear].tolist() == before
    rows = omega * rng.uniform(0.01, 100, (n, 1))
    lengths = references * rng.uniform(0.01, 100, (K, T, 1))
    assert np.array(routed(rows, lengths, known))[clear].tolist() == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_faint_float32_relevance_is_routed_like_a_strong_one(dtype):
    omega, references = [[3.0, 1.0], [1.0, 3.0]], [[[1.0, 0.0], [1.0, 2.0]]]
    for scale in (1e-12, 1e-6, 1.0, 1e6, 1e12):
        assert routed(scale * np.array(omega), references, [[True, True]], dtype) == [0, 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(2, 6), seeds)
def test_what_a_client_does_not_know_does_not_compete(n, K, T, seed):
    """Whatever stands in the rows of unknown tasks; a task nobody knows is never chosen."""
    rng = np.random.default_rng(seed)
    omega, references, known = draw(rng, n, K, T, padded=False)
    before = routed(omega, references, known)
    disturbed = np.where(known[:, :, None], references, omega[rng.integers(n)])
    assert routed(omega, disturbed, known) == before
    assert all(known[:, tau].any() for tau in before)
    # Clients that know nothing have no vote.
    silent = np.concatenate([disturbed, np.tile(omega[0], (4, T, 1))])
    assert routed(omega, silent, np.concatenate([known, np.zeros((4, T), dtype=bool)])) == before


@pytest.mark.parametrize("T", range(1, 10))
@pytest.mark.parametrize("K", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_identical_references_give_the_earlier_task(T, K, dtype):
    rng = np.random.default_rng(T)
    references = np.tile(rng.random((K, 1, T)), (1, T, 1))
    omega = rng.random((40, T))
    assert routed(omega, references, np.ones((K, T), dtype=bool), dtype) == [0] * 40
    known = np.ones((K, T), dtype=bool)
    known[:, : T // 2] = False
    assert routed(omega, references, known, dtype) == [T // 2] * 40


def test_a_zero_vector_is_similar_to_nothing():
    """Every similarity is 0: each client's earliest task, then the vote, then the earlier task."""
    references = np.ones((3, 3, 3))
    omega = np.zeros((1, 3))
    assert routed(omega, references, [[1, 1, 1], [1, 1, 1], [1, 1, 1]]) == [0]
    assert routed(omega, references, [[0, 1, 0], [0, 1, 1], [1, 0, 0]]) == [1]
    assert routed(omega, references, [[0, 0, 1], [0, 1, 0], [0, 0, 0]]) == [1]
    # A reference of zeros loses against any other and does not become NaN.
    references[:, 0] = 0
    assert routed(np.ones((1, 3)), references, np.ones((3, 3))) == [1]
    assert routed(np.ones((1, 3)), np.zeros((2, 3, 3)), np.ones((2, 3))) == [0]


def similar_to_first_axis(similarity: float, T: int = 3) -> np.ndarray:
    """A vector over tasks whose cosine with the first axis is that."""
    vector = np.zeros(T)
    vector[0], vector[1] = similarity, np.sqrt(1 - similarity**2)
    return vector


def by_similarity(table) -> int:
    """The route of one sample when client k's similarity to task tau is table[k][tau]; None: unknown."""
    K, T = len(table), len(table[0])
    references, known = np.zeros((K, T, T)), np.zeros((K, T), dtype=bool)
    for k, row in enumerate(table):
        for tau, similarity in enumerate(row):
            if similarity is not None:
                references[k, tau] = similar_to_first_axis(similarity, T)
                known[k, tau] = True
    omega = np.eye(T)[:1]
    (result,) = routed(omega, references, known)
    assert oracle.route(omega, references, known)[0].tolist() == [result]
    return result


def test_a_majority_wins_against_a_higher_sum():
    assert by_similarity([[0.5, 0.4, 0.1], [0.5, 0.4, 0.1], [0.0, 1.0, 0.2]]) == 0


def test_a_tied_vote_goes_to_the_higher_sum():
    assert by_similarity([[0.9, 0.2, 0.0], [0.1, 0.4, 0.0]]) == 0
    assert by_similarity([[0.4, 0.1, 0.0], [0.2, 0.9, 0.0]]) == 1


def test_a_tie_is_among_the_leaders_only():
    """Task 2 has the highest sum and no vote; task 1 a higher sum than the leaders and too few votes."""
    assert by_similarity([[0.9, 0.1, 0.8], [0.1, 0.85, 0.8]]) == 0
    assert by_similarity([[0.5, 0.48, 0.49], [0.5, 0.48, 0.49], [0.1, 0.2, 0.6], [0.1, 0.2, 0.6], [0.0, 0.9, 0.1]]) == 2


def test_the_sum_is_over_the_clients_that_know_the_task_and_not_a_mean():
    assert by_similarity([[0.9, None, None], [None, 0.5, None], [None, 0.55, 0.6]]) == 1


def test_equal_votes_and_equal_sums_go_to_the_earlier_task():
    assert by_similarity([[0.8, 0.6, 0.0], [0.6, 0.8, 0.0]]) == 0
    assert by_similarity([[0.0, 0.6, 0.8], [0.0, 0.8, 0.6]]) == 1
    assert by_similarity([[None, None, 0.6], [None, 0.6, None]]) == 1


def test_the_zeros_of_later_tasks_count_in_the_cosine():
    """Task 0's reference was recorded alone; an input that is as relevant to task 1 is nearer to task 1's reference."""
    references, known = [[[2.0, 0.0], [1.0, 1.0]]], [[True, True]]
    assert routed([[1.0, 0.0], [1.0, 1.0], [1.0, 0.3], [0.0, 1.0]], references, known) == [0, 1, 0, 1]


def test_one_task_and_no_samples():
    assert routed([[0.3], [0.0]], [[[1.0]], [[2.0]]], [[True], [False]]) == [0, 0]
    assert routed(np.zeros((0, 2)), np.ones((3, 2, 2)), np.ones((3, 2))) == []


def test_routing_writes_to_none_of_its_arguments():
    omega, references, known = draw(np.random.default_rng(0), 5, 4, 3, padded=True)
    arguments = tensor(omega), tensor(references), torch.from_numpy(known)
    kept = [t.clone() for t in arguments]
    once, twice = route(*arguments), route(*arguments)
    assert torch.equal(once, twice)
    assert all(torch.equal(t, before) for t, before in zip(arguments, kept, strict=True))


def test_samples_are_routed_one_by_one():
    """What else is in the batch does not matter (the side information of task-pure batches)."""
    omega, references, known = draw(np.random.default_rng(1), 40, 5, 4, padded=True)
    together = routed(omega, references, known)
    assert together == [routed(omega[i : i + 1], references, known)[0] for i in range(40)]


# The whole of TIP -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("overlap", [0.0, 0.3])
def test_well_separated_tasks_are_routed_right(overlap, dtype):
    """Tasks in subspaces of their own plus a common one; bases, references and votes as in the paper."""
    rng = np.random.default_rng(0)
    K, T, d, r = 4, 5, 200, 5
    Q = orthonormal(rng, d, d)
    common, own = Q[:, :3], [Q[:, 3 + r * t : 3 + r * (t + 1)] for t in range(T)]

    def samples(t: int, n: int) -> torch.Tensor:
        inside = own[t] @ np.abs(rng.standard_normal((r, n))) + overlap * common @ rng.standard_normal((3, n))
        return tensor(inside.T + 0.01 * rng.standard_normal((n, d)), dtype)

    Phi, bases = torch.zeros(d, 0, dtype=dtype), []
    references, known = torch.zeros(K, T, T, dtype=dtype), torch.zeros(K, T, dtype=torch.bool)
    for t in range(T):
        data = {k: samples(t, 30) for k in range(K) if (k + t) % 4}  # one client misses each task
        before = Phi.shape[1]
        uploads = [core_basis(A.T, Phi, 0.8)[0] for A in data.values()]
        for U in uploads:
            Phi = append_basis(Phi, U, 1e-4)
        bases.append(Phi[:, before:])
        for k, A in data.items():
            omega = relevance(A, bases).mean(dim=0)
            references[k, t, : t + 1], known[k, t] = omega, True
            expected = oracle.reference(array(A), [array(U) for U in bases], T)
            np.testing.assert_allclose(array(references[k, t]), expected, atol=10 * NOISE[dtype])
    for t in range(T):
        assert (route(relevance(samples(t, 50), bases), references, known) == t).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_routes_like_the_cpu(dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rng = np.random.default_rng(2)
    omega, references, known = draw(rng, 200, 5, 6, padded=True)
    clear = torch.from_numpy(oracle.route(omega, references, known)[1] > 1e-4)
    there = tensor(omega, dtype).cuda(), tensor(references, dtype).cuda(), torch.from_numpy(known).cuda()
    result = route(*there)
    assert result.device.type == "cuda"
    assert result.cpu()[clear].tolist() == np.array(routed(omega, references, known, dtype))[clear].tolist()
    same = tensor(np.tile(omega[:5, None, :], (1, 6, 1)), dtype)
    everything = torch.ones(5, 6, dtype=torch.bool)
    assert (route(there[0], same.cuda(), everything.cuda()) == 0).all()
    A, bases = tensor(rng.standard_normal((9, 12)), dtype), [tensor(orthonormal(rng, 12, q), dtype) for q in (0, 3, 12)]
    torch.testing.assert_close(relevance(A.cuda(), [U.cuda() for U in bases]).cpu(), relevance(A, bases))


# The oracle itself ----------------------------------------------------------------------------------------------------


def test_the_oracle_on_cases_done_by_hand():
    e = np.eye(3)
    A = np.array([[3.0, 4.0, 0.0], [0.0, 0.0, 2.0]])
    np.testing.assert_allclose(oracle.relevance(A, [e[:, :1], e[:, :2], e[:, :0]]), [[3, 5, 0], [0, 0, 0]])
    np.testing.assert_allclose(oracle.reference(A, [e[:, :1], e[:, :2]], 4), [1.5, 2.5, 0, 0])
    assert oracle.cosine(np.array([3.0, 4.0]), np.array([1.0, 0.0])) == pytest.approx(0.6)
    assert oracle.cosine(np.zeros(2), np.ones(2)) == 0
    references = [[[1.0, 0.0], [1.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]]
    # Client 0 votes for task 0 (1 against 0.71), client 1 is indifferent and votes for task 0.
    assert oracle.route_one(np.array([1.0, 0.0]), references, [[1, 1], [1, 1]]) == (0, 0.0)
    task, margin = oracle.route_one(np.array([1.0, 1.0]), references, [[1, 1], [0, 1]])
    assert task == 1
    assert margin == pytest.approx(1 - np.sqrt(0.5))
