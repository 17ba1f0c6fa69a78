"""FedLDA against deviations from class means, one by one, and what linear discriminants are known for."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.covariance import oas as sklearn_oas
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from fcl_bench.engine.validation import BadUpload
from fcl_bench.errors import UserError
from fcl_bench.methods.closed_form.fedlda import FedLDA, oas_share, within_scatter
from fcl_bench.typed import typed_instance
from tests.methods import discriminant_oracle as oracle
from tests.methods.harness import (
    context_of,
    dealt,
    draw_tasks,
    learn,
    learn_task,
    projection_of,
    relative_error,
    shard_of,
    stream_of,
    take_in,
    turn,
)

KNOBS = [
    {},
    {"shrinkage": "oas"},
    {"shrinkage": 0.3},
    {"shrinkage": 1e-3, "prior": "counts"},
    {"shrinkage": 1.0},
]


def one_client(Z: np.ndarray, labels: np.ndarray) -> list:
    return [[(Z, labels)]]


def scores_of(method: FedLDA, Z: np.ndarray, labels: np.ndarray, X: np.ndarray) -> np.ndarray:
    server, _ = learn(method, context_of(Z.shape[1]), one_client(Z, labels))
    return server.predict(torch.from_numpy(X)).numpy()


def blobs(seed: int, inputs: int = 6, samples: int = 90, spread: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Three classes of very different sizes, with a covariance that is far from round."""
    rng = np.random.default_rng(seed)
    labels = np.array([0, 0, 0, 0, 0, 0, 1, 1, 1, 2] * (samples // 10))
    mixing = rng.standard_normal((inputs, inputs))
    return spread * rng.standard_normal((3, inputs))[labels] + rng.standard_normal((samples, inputs)) @ mixing, labels


@pytest.mark.parametrize("knobs", KNOBS)
@settings(max_examples=3, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(1, 40),
    beta=st.sampled_from([0.05, 100]),
    M=st.sampled_from([None, 12]),
    returning=st.booleans(),
)
def test_the_classifier_is_the_centralised_one_for_any_partition_and_order(knobs, seed, clients, beta, M, returning):
    """Classes that come back included; the order of the clients' turns is drawn, too."""
    rng = np.random.default_rng(seed)
    pooled = draw_tasks(rng, 5, [3, 2, 2], [[60], [50], [40]], offset=1.0)
    if returning:
        pooled[2] = [(Z, labels % 6) for Z, labels in pooled[2]]
    tasks = dealt(rng, pooled, clients, beta)
    method, context = FedLDA(M=M, **knobs), context_of(5)
    server = method.server(context)
    for task, own, (Z, labels) in zip(stream_of(tasks), tasks, oracle.pooled(tasks), strict=True):
        learn_task(method, context, server, task, own, rng.permutation(len(own)))
        P = projection_of(server)
        H = Z if P is None else np.maximum(Z @ P, 0)
        W, b = oracle.lda(H, labels, **knobs)
        assert relative_error(server.model()["W"], W) < 1e-8
        assert relative_error(server.model()["bias"], b) < 1e-8


def test_one_client_with_all_the_data_is_as_good_as_many():
    rng = np.random.default_rng(4)
    pooled = draw_tasks(rng, 6, [3, 2], [[80], [70]])
    for shrinkage in (0.0, "oas"):
        [one, many] = [
            learn(FedLDA(M=20, shrinkage=shrinkage), context_of(6), tasks)[0].model()
            for tasks in (pooled, dealt(rng, pooled, 25, 0.1))
        ]
        assert relative_error(many["W"], one["W"].numpy()) < 1e-8
        assert relative_error(many["bias"], one["bias"].numpy()) < 1e-8


@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_the_scatter_from_sums_is_that_of_the_deviations(offset):
    Z, labels = blobs(0)
    Z = Z + offset
    G, S, n = Z.T @ Z, Z.T @ np.eye(3)[labels], np.bincount(labels)
    found = within_scatter(*map(torch.from_numpy, (G, S, n)))
    assert relative_error(found, oracle.scatter_of(Z, labels)) < 1e-14 * (1 + offset**2)


def test_without_shrinkage_the_scale_of_the_features_does_not_count():
    (Z, labels), (X, _) = blobs(1), blobs(2)
    at_one = scores_of(FedLDA(shrinkage=0.0), Z, labels, X)
    for factor in (1e-3, 1e4):
        scaled = scores_of(FedLDA(shrinkage=0.0), factor * Z, labels, factor * X)
        assert np.abs(scaled - at_one).max() < 1e-9 * np.abs(at_one).max()
        oas = [scores_of(FedLDA(shrinkage="oas"), f * Z, labels, f * X) for f in (1.0, factor)]
        assert np.abs(oas[1] - oas[0]).max() < 1e-9 * np.abs(oas[0]).max()
        unit = [scores_of(FedLDA(shrinkage=0.2), f * Z, labels, f * X) for f in (1.0, factor)]
        assert np.abs(unit[1] - unit[0]).max() > 1e-2 * np.abs(unit[0]).max()


def test_without_shrinkage_any_invertible_map_of_the_features_leaves_the_score_differences():
    (Z, labels), (X, _) = blobs(1), blobs(2)
    A = np.linalg.qr(np.random.default_rng(3).standard_normal((6, 6)))[0] * np.linspace(0.5, 3, 6)
    both = [scores_of(FedLDA(shrinkage=0.0), Z @ T + o, labels, X @ T + o) for T, o in ((np.eye(6), 0), (A, 5.0))]
    both = [scores - scores.mean(axis=1, keepdims=True) for scores in both]
    assert np.abs(both[1] - both[0]).max() < 1e-7 * np.abs(both[0]).max()


def test_the_boundary_of_two_spherical_classes_is_at_the_midpoint():
    """Exactly, for samples at +-e_i around each mean: the scatter is a multiple of the identity."""
    ball = np.concatenate([np.eye(4), -np.eye(4)])
    means = np.array([[3.0, 1, 0, 2], [-1, 1, 4, 0]])
    Z, labels = np.concatenate([means[0] + ball, means[1] + ball]), np.repeat([0, 1], 8)
    middle = means.mean(axis=0)
    along, across = means[1] - means[0], np.array([1.0, 1, 1, 0])
    assert along @ across == 0
    points = np.array([middle, middle + 7 * across, middle + 0.01 * along, middle - 0.01 * along])
    for method in (FedLDA(), FedLDA(shrinkage="oas"), FedLDA(prior="counts")):
        differences = np.diff(scores_of(method, Z, labels, points), axis=1)[:, 0]
        assert np.abs(differences[:2]).max() < 1e-10
        assert differences[2] > 0 > differences[3]
    # Twice as many samples of the second class move it by log 2, and only with that prior.
    Z, labels = np.concatenate([Z, means[1] + ball]), np.append(labels, np.ones(8, dtype=int))
    for prior, expected in (("uniform", 0.0), ("counts", np.log(2))):
        scores = scores_of(FedLDA(prior=prior), Z, labels, points[:1])
        assert scores[0, 1] - scores[0, 0] == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("shrinkage", [1e-4, 0.5, "oas"])
def test_a_rotation_of_the_features_changes_nothing(shrinkage):
    (Z, labels), (X, _) = blobs(1), blobs(2)
    Q, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 6)))
    plain, rotated = (scores_of(FedLDA(shrinkage=shrinkage), Z @ T, labels, X @ T) for T in (np.eye(6), Q))
    assert np.abs(rotated - plain).max() < 1e-9 * np.abs(plain).max()


@pytest.mark.parametrize("shrinkage", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("prior", ["uniform", "counts"])
def test_scikit_learn_finds_the_same(shrinkage, prior):
    """Its covariance is divided by N, and shrunk towards the mean variance: another share, other lengths of weights."""
    (Z, labels), (X, _) = blobs(5, samples=120), blobs(6)
    priors = np.full(3, 1 / 3) if prior == "uniform" else None
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage, priors=priors)
    if prior == "uniform":
        # It weighs the classes' covariances by the priors, too, so they are all of one size here.
        keep = np.concatenate([np.flatnonzero(labels == c)[:12] for c in range(3)])
        Z, labels = Z[keep], labels[keep]
    theirs.fit(Z, labels)
    N, S = len(Z), oracle.scatter_of(Z, labels)
    odds = shrinkage / (1 - shrinkage) * np.trace(S) / 6 / (N - 3)
    share = odds / (1 + odds)
    length = (N - 3) / N * (1 - shrinkage) / (1 - share)
    log_prior = np.log(theirs.priors_)
    ours = scores_of(FedLDA(shrinkage=share, prior=prior), Z, labels, X)
    expected = length * (X @ theirs.coef_.T + theirs.intercept_ - log_prior) + log_prior
    assert np.abs(ours - expected).max() < 1e-8 * np.abs(expected).max()
    assert prior == "counts" or (ours.argmax(axis=1) == theirs.predict(X)).all()


def test_oas_by_hand_and_beside_scikit_learn():
    """Sigma = diag(1, 3), N = 4: tr^2 = 16, tr Sigma^2 = 10, M = 2: (0 + 16) / (4 * (10 - 8)) = 2, at most 1."""
    assert oas_share(4.0, 10.0, 2, 4) == 1.0
    assert oas_share(4.0, 10.0, 2, 40) == pytest.approx(16 / (40 * 2))
    assert oas_share(6.0, 12.0, 3, 10) == 1.0  # nothing but a multiple of the identity
    assert oas_share(0.0, 0.0, 3, 10) == 1.0
    rng = np.random.default_rng(0)
    A = rng.standard_normal((500, 40)) @ (rng.standard_normal((40, 40)) * np.linspace(0.1, 2, 40))
    Sigma = A.T @ A / len(A)
    share = oas_share(np.trace(Sigma), np.square(Sigma).sum(), 40, 500)
    assert share == pytest.approx(oracle.oas(Sigma, 500), rel=1e-12)
    # scikit-learn drops the terms 2/M of Eq. 23, so it differs in that order.
    assert share == pytest.approx(sklearn_oas(A, assume_centered=True)[1], rel=2 / 40)
    assert share != pytest.approx(sklearn_oas(A, assume_centered=True)[1], rel=1e-4)


def test_the_share_is_reported():
    Z, labels = blobs(1)
    server, _ = learn(FedLDA(shrinkage="oas"), context_of(6), one_client(Z, labels))
    Sigma = oracle.scatter_of(Z, labels) / (len(Z) - 3)
    assert server.report()["shrinkage"] == pytest.approx(oracle.oas(Sigma, len(Z)), rel=1e-9)


def test_erratum_slda_weighs_deviations_by_the_count_of_all_samples():
    """50 samples, 3 classes, 6 features: wrong by .164 at entries up to 1.10, and by something else in another order.

    With the class's own count the recursion is FedLDA's scatter over N, in any order.
    """
    rng = np.random.default_rng(6)
    X, labels = rng.standard_normal((50, 6)), rng.integers(0, 3, 50)
    Z = torch.from_numpy(X)
    exact = within_scatter(Z.T @ Z, Z.T @ torch.eye(3).to(Z)[labels], torch.bincount(torch.from_numpy(labels))) / 50
    turned = np.arange(50)[::-1]
    coded, backwards = oracle.slda(X, labels, 3), oracle.slda(X[turned], labels[turned], 3)
    assert float(exact.abs().max()) == pytest.approx(1.10, abs=5e-3)
    assert np.abs(coded - exact.numpy()).max() == pytest.approx(0.164, abs=5e-4)
    assert np.abs(coded - backwards).max() > 0.05
    for order in (np.arange(50), turned):
        assert relative_error(exact, oracle.slda_mended(X[order], labels[order], 3)) < 1e-13


@pytest.mark.parametrize(("wire", "least", "most"), [("float32", 1e-3, 1.0), ("float64", 0.0, 1e-4)])
def test_means_that_are_far_larger_than_the_spread(wire, least, most, caplog):
    """Offset 1000: what is summed is lost in float32, and told; in float64 it is not."""
    rng = np.random.default_rng(0)
    tasks = draw_tasks(rng, 6, [3, 2], [[70, 50], [60, 40]], offset=1000.0)
    *_, (Z, labels) = oracle.pooled(tasks)
    W, b = oracle.lda(Z, labels, shrinkage=0.01)
    expected = Z @ W + b
    expected -= expected.mean(axis=1, keepdims=True)
    with caplog.at_level(logging.WARNING):
        server, _ = learn(FedLDA(shrinkage=0.01), context_of(6, wire=wire), tasks)
    found = server.predict(torch.from_numpy(Z)).numpy()
    found -= found.mean(axis=1, keepdims=True)
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert least <= error <= most
    assert bool(caplog.records) == (wire == "float32")
    assert all("condition number" in record.message for record in caplog.records)


def test_uploads_that_contradict_themselves_are_told(caplog):
    """Half a Gram matrix is refused; one of the same trace but no direction is not, and no classes have its scatter."""
    tasks = draw_tasks(np.random.default_rng(0), 6, [2], [[40]], offset=2.0)
    context, method, [task] = context_of(6), FedLDA(), stream_of(tasks)
    client, server = method.client(context), method.server(context)
    server.start_task(task)
    upload = turn(client, shard_of(0, 0, *tasks[0][0]), server.broadcast(task, 0))
    with pytest.raises(BadUpload, match="S is larger than G allows"):
        take_in(server, 0, upload.with_tensors({**upload, "G": upload["G"] / 2}), task)
    round_ = upload["G"].trace() / 6 * torch.eye(6, dtype=torch.float64)
    take_in(server, 0, upload.with_tensors({**upload, "G": round_}), task)
    with caplog.at_level(logging.WARNING):
        server.finish_task()
    assert "the system is indefinite" in caplog.records[0].message
    assert torch.isfinite(server.model()["W"]).all()


def test_an_absent_class_never_wins_and_changes_nothing():
    Z, labels = blobs(0)
    absent = np.where(labels == 2, 3, labels)
    X = blobs(1)[0]
    with_gap, without = scores_of(FedLDA(), Z, absent, X), scores_of(FedLDA(), Z, labels, X)
    assert np.isfinite(with_gap).all()
    assert np.abs(with_gap[:, [0, 1, 3]] - without).max() < 1e-9 * np.abs(without).max()
    assert (with_gap[:, 2] < -1e100).all()


def test_one_sample_per_class_is_the_nearest_mean():
    """No deviation is left, so the covariance is the identity's share."""
    Z = np.random.default_rng(0).standard_normal((3, 6))
    X = np.random.default_rng(1).standard_normal((50, 6))
    scores = scores_of(FedLDA(), Z, np.arange(3), X)
    assert (scores.argmax(axis=1) == ((X[:, None] - Z) ** 2).sum(axis=2).argmin(axis=1)).all()


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"shrinkage": 1.5}, "method.shrinkage=1.5 is out of range (0 to 1)"),
        ({"shrinkage": "ledoit"}, "method.shrinkage=ledoit is not known"),
    ],
)
def test_knobs_that_can_not_be(knobs, told):
    with pytest.raises(UserError) as error:
        typed_instance(FedLDA, knobs, "method")
    assert str(error.value).startswith(told)
