"""FedFeCAM against the oracle on pooled data, hand values, limits and invariances."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.errors import UserError
from fcl_bench.linalg.structure import packed, symmetric, triangular
from fcl_bench.methods.closed_form import fedfecam
from fcl_bench.methods.closed_form.fedfecam import FedFeCAM, correlations, shrunk, whitening
from fcl_bench.typed import typed_instance
from tests.methods import fedfecam_oracle as oracle
from tests.methods.harness import (
    Tasks,
    context_of,
    dealt,
    draw_tasks,
    learn,
    learn_task,
    random_tasks,
    shard_of,
    stream_of,
    turn,
)
from tests.methods.test_recurring_classes import blurred_tasks

VARIANTS = {
    "class": {},
    "class, shrunk once": {"a1": 0.3, "a2": 0.2, "shrinkings": 1},
    "class, plain features": {"tukey": 1.0},
    "class, power .3": {"tukey": 0.3},
}
variants = pytest.mark.parametrize("knobs", VARIANTS.values(), ids=VARIANTS.keys())


@pytest.fixture(autouse=True, scope="module")
def exact():
    """Covariances in float64, so that what differs from the oracle is the formula."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedfecam, "KEPT", torch.float64)
        yield


def positive(tasks: Tasks) -> Tasks:
    return [[(np.abs(Z), labels) for Z, labels in clients] for clients in tasks]


def pooled(tasks: Tasks) -> tuple[np.ndarray, np.ndarray]:
    parts = [part for clients in tasks for part in clients]
    return np.concatenate([Z for Z, _ in parts]), np.concatenate([labels for _, labels in parts]).astype(int)


def queries(d: int = 8, n: int = 40) -> np.ndarray:
    return np.abs(np.random.default_rng(99).standard_normal((n, d)))


def scores(server, Q: np.ndarray) -> np.ndarray:
    return server.predict(torch.from_numpy(Q)).numpy()


def error(server, D: np.ndarray, Q: np.ndarray) -> float:
    """Largest difference over the largest distance; a class without a sample must be far below all others."""
    ours, seen = scores(server, Q), np.isfinite(D).all(axis=0)
    assert (ours[:, ~seen] < ours[:, seen].min() - 1).all()
    return float(np.abs(ours[:, seen] + D[:, seen]).max() / D[:, seen].max())


def knobs_of(method: FedFeCAM) -> dict:
    return {name: getattr(method, name) for name in ("tukey", "a1", "a2", "shrinkings")}


@variants
@pytest.mark.parametrize("seed", range(5))
def test_it_agrees_with_the_oracle_on_pooled_data_after_every_task(seed, knobs):
    tasks, Q, method = positive(random_tasks(seed, 12)), queries(), FedFeCAM(**knobs)
    context = context_of(8)
    server = method.server(context)
    for t, task in enumerate(stream_of(tasks)):
        learn_task(method, context, server, task, tasks[t])
        assert error(server, oracle.distances(*pooled(tasks[: t + 1]), Q, knobs_of(method)), Q) < 1e-8


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(1, 100),
    beta=st.sampled_from([0.05, 0.5, 100]),
)
def test_it_is_the_centralised_solution_for_any_partition_and_order(seed, clients, beta):
    rng = np.random.default_rng(seed)
    tasks, Q = positive(draw_tasks(rng, 5, [3, 2], [[60], [50]])), queries(5)
    method = FedFeCAM()
    server, _ = learn(method, context_of(5), dealt(rng, tasks, clients, beta))
    assert error(server, oracle.distances(*pooled(tasks), Q, knobs_of(method)), Q) < 1e-8


@variants
def test_classes_that_come_back_add_to_their_sums(knobs):
    tasks, Z, labels = blurred_tasks(np.random.default_rng(4))
    Q, method = queries(), FedFeCAM(**knobs)
    server, _ = learn(method, context_of(8), positive(tasks))
    assert error(server, oracle.distances(np.abs(Z), labels, Q, knobs_of(method)), Q) < 1e-8


def test_random_features_are_what_it_works_on():
    tasks = draw_tasks(np.random.default_rng(0), 6, [3, 2], [[40, 30], [50, 9]])
    method = FedFeCAM(M=20)
    server, _ = learn(method, context_of(6), tasks)
    P = server.model()["projection"].numpy()
    Z, labels = pooled(tasks)
    Q = np.random.default_rng(1).standard_normal((30, 6))
    H, HQ = np.maximum(Z @ P, 0), np.maximum(Q @ P, 0)
    assert error(server, oracle.distances(H, labels, HQ, knobs_of(method)), Q) < 1e-8


def test_shrinkage_and_correlation_by_hand():
    S = torch.tensor([[2.0, 1.0], [1.0, 4.0]], dtype=torch.float64)
    once = shrunk(S, 1, 1)
    assert torch.equal(once, torch.tensor([[5.0, 2.0], [2.0, 7.0]], dtype=torch.float64))
    assert float(correlations(once)[0, 1]) == pytest.approx(2 / 35**0.5) == pytest.approx(0.338062, abs=1e-6)
    assert torch.equal(shrunk(once, 1, 1), torch.tensor([[11.0, 4.0], [4.0, 13.0]], dtype=torch.float64))
    # Entries that are zero do not count among those beside the diagonal.
    wide = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    wide[0, 1] = wide[1, 0] = 0.6
    assert shrunk(wide, 0, 1)[0].tolist() == [1.0, 1.2, 0.6]


def test_distances_in_two_features_by_hand():
    """Class 0: (4, 0), (0, 4) and (4, 4); h = z^.5. Means of z (8/3, 8/3), of h (4/3, 4/3): m/|m| = (1, 1)/sqrt 2."""
    Z = np.array([[4.0, 0], [0, 4], [4, 4], [1, 0], [0, 9]])
    labels = np.array([0, 0, 0, 1, 2])
    server, _ = learn(FedFeCAM(shrinkings=0), context_of(2), [[(Z, labels)]])
    # Sigma = 4/3 [[1, -1/2], [-1/2, 1]], its correlation -1/2, the inverse 4/3 [[1, 1/2], [1/2, 1]].
    r = 1 - 0.5**0.5, -(0.5**0.5)
    first = 4 / 3 * (r[0] ** 2 + r[1] ** 2 + r[0] * r[1])
    # Classes 1 and 2 have one sample each: the identity.
    np.testing.assert_allclose(scores(server, np.array([[9.0, 0.0]])), [[-first, 0, -2]], atol=1e-12)


@variants
@pytest.mark.parametrize("scale", [1e-3, 100.0])
def test_the_scale_of_features_does_not_matter(knobs, scale):
    tasks, Q = positive(draw_tasks(np.random.default_rng(2), 8, [3, 2], [[40, 30], [50, 9]])), queries()
    method = FedFeCAM(**knobs)
    plain, _ = learn(method, context_of(8), tasks)
    scaled, _ = learn(method, context_of(8), [[(scale * Z, labels) for Z, labels in clients] for clients in tasks])
    np.testing.assert_allclose(scores(scaled, scale * Q), scores(plain, Q), rtol=1e-9)


@pytest.mark.parametrize("rank", [1, 4, 9, 10])
def test_whitening_by_cholesky_and_by_eigenvalues_is_the_pseudo_inverse(rank):
    A = np.random.default_rng(rank).standard_normal((rank if rank < 10 else 40, 10))
    S = A.T @ A
    made = whitening(torch.from_numpy(S))
    T = made.factor
    assert (made.rank, made.indefinite) == (rank, False)
    assert torch.equal(T, T.triu())
    np.testing.assert_allclose((T @ T.T).numpy(), np.linalg.pinv(S, rcond=1e-12, hermitian=True), rtol=1e-8, atol=1e-10)
    values = np.linalg.eigvalsh(S)[10 - rank :]
    assert made.condition == pytest.approx(values[-1] / values[0], rel=0.1)


def test_whitening_leaves_out_what_is_noise_or_negative():
    S = torch.diag(torch.tensor([4.0, 1.0, 1e-9], dtype=torch.float64))
    assert (whitening(S).rank, whitening(S, noise=1e-6).rank) == (3, 2)
    indefinite = whitening(torch.diag(torch.tensor([4.0, -1.0], dtype=torch.float64)))
    assert (indefinite.rank, indefinite.indefinite) == (1, True)
    assert (indefinite.factor @ indefinite.factor.T).tolist() == [[0.25, 0], [0, 0]]


def test_triangles_are_packed_and_come_back():
    S = torch.tensor([[1.0, 2, 3], [2, 4, 5], [3, 5, 6]])
    assert packed(S).tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.equal(symmetric(packed(S)), S)
    assert torch.equal(triangular(packed(S)), S.triu())


def test_float32_memory_changes_little(monkeypatch):
    monkeypatch.setattr(fedfecam, "KEPT", torch.float32)
    tasks, Q = positive(draw_tasks(np.random.default_rng(6), 8, [3, 2], [[50, 40], [30, 60]])), queries()
    context = context_of(8, wire="float32")
    coarse, _ = learn(FedFeCAM(), context, tasks)
    D = oracle.distances(*pooled(tasks), Q, knobs_of(FedFeCAM()))
    assert coarse.moments.dtype == torch.float32
    assert 0 < error(coarse, D, Q) < 1e-5


@variants
def test_the_saved_model_predicts(knobs):
    tasks, Q, method = positive(random_tasks(3, 12)), queries(), FedFeCAM(**knobs)
    server, _ = learn(method, context_of(8), tasks)
    model = {name: tensor.numpy() for name, tensor in server.model().items()}
    u, C = oracle.unit(Q**method.tukey), len(model["n"])
    for c in range(C):
        T = np.zeros((8, 8))
        T[np.triu_indices(8)] = model["whitening"][c]
        D = (((u - model["W"][:, c]) @ T) ** 2).sum(axis=1)
        np.testing.assert_allclose(scores(server, Q)[:, c], -D, rtol=1e-8, atol=1e-10)


def test_without_shrinkage_few_samples_are_told_and_scored_by_the_pseudo_inverse(caplog):
    tasks, Q = positive(draw_tasks(np.random.default_rng(9), 12, [2], [[8, 9]])), queries(12)
    method = FedFeCAM(shrinkings=0)
    with caplog.at_level(logging.WARNING):
        server, _ = learn(method, context_of(12), tasks)
    [told] = [record.message for record in caplog.records]
    Z, labels = pooled(tasks)
    assert np.bincount(labels).tolist() == [4, 13]
    assert "covariances are singular to rounding: 1 of 2 with ranks 3 to 3 of 12; Moore-Penrose inverse" in told
    knobs = knobs_of(method)
    D = np.zeros((len(Q), 2))
    for c in range(2):
        h = np.sqrt(Z[labels == c])
        S = oracle.prepared(h - h.mean(axis=0), len(h) - 1, knobs)
        r = oracle.unit(np.sqrt(Q)) - oracle.unit(np.sqrt(Z[labels == c].mean(axis=0)))
        D[:, c] = np.einsum("ni,ij,nj->n", r, np.linalg.pinv(S, rcond=1e-10, hermitian=True), r)
    assert error(server, D, Q) < 1e-7


@variants
@pytest.mark.parametrize("wire", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_dead_constant_and_huge_features_give_finite_scores(knobs, wire, scale):
    tasks = positive(draw_tasks(np.random.default_rng(0), 8, [2, 2], [[20, 3], [15, 1]]))
    for clients in tasks:
        for Z, _ in clients:
            Z *= scale
            Z[:, 0], Z[:, 1], Z[:, 2] = 0, scale, Z[:, 3]
    server, _ = learn(FedFeCAM(**knobs), context_of(8, wire=wire), tasks)
    Q = np.concatenate([scale * queries(), np.zeros((1, 8))])
    assert np.isfinite(scores(server, Q)).all()
    assert np.isfinite(server.report()["condition"])


def test_an_impossible_power_is_told():
    with pytest.raises(UserError, match=r"^method\.tukey=0\.0 is out of range \(above 0, at most 1 \(none\)\)"):
        typed_instance(FedFeCAM, {"tukey": 0}, "method")


def test_features_below_zero_are_told_in_training_and_tests():
    tasks = draw_tasks(np.random.default_rng(0), 6, [3], [[20]])
    with pytest.raises(UserError, match=r"^method\.tukey=0\.5 takes features that are not negative, and here is one"):
        learn(FedFeCAM(), context_of(6), tasks)
    server, _ = learn(FedFeCAM(), context_of(6), positive(tasks))
    with pytest.raises(UserError, match=r"method\.tukey=1, or ReLU features"):
        scores(server, np.full((1, 6), -1.0))
    plain, _ = learn(FedFeCAM(tukey=1.0), context_of(6), tasks)
    assert np.isfinite(scores(plain, np.full((1, 6), -1.0))).all()


def test_more_covariances_than_memory_are_refused_before_any_work():
    with pytest.raises(UserError, match=r"^method=fedfecam on 2048 features needs .* GiB for 100000 covariances"):
        FedFeCAM().check(context_of(2048), [1000] * 100)


def test_uploads_that_contradict_themselves_are_refused():
    method, context = FedFeCAM(), context_of(6)
    tasks = positive(draw_tasks(np.random.default_rng(0), 6, [3], [[20]]))
    [task] = stream_of(tasks)
    server = method.server(context)
    server.start_task(task)
    upload = turn(method.client(context), shard_of(0, 0, *tasks[0][0]), server.broadcast(task, 0))
    assert server.objection(upload) == ""
    told = server.objection(upload.with_tensors({**upload, "n": upload["n"] * torch.tensor([0, 1, 1])}))
    assert told == "S has 3 columns, and n says that 2 classes have samples"
