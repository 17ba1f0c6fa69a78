"""Score scaling: every identity and limit of docs/explanation/score_scaling.md."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.closed_form.afcl import AFCL
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.algebra.ridge import unit_lengths
from fcl_bench.methods.closed_form.centralised_ridge import CentralisedRidge
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.methods.closed_form.gaussian_sketch import GaussianSketch
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.methods.closed_form.stsa_e import STSAE
from fcl_bench.typed import typed_instance
from tests.conftest import shared
from tests.methods.harness import Tasks, context_of, draw_tasks, learn, projection_of, relative_error

METHODS = {
    "stsa": STSA(M=30, gamma=2.0),
    "stsa_e": STSAE(M=30, gamma=2.0, dummy_clients=3),
    "fedran": FedRAN(M=30, rank=10),
    "fedran floor": FedRAN(M=30, rank=10, complement="floor"),
    "centred_sketch": CentredSketch(M=30, rank=4, ridge=2.0),
    "gaussian_sketch": GaussianSketch(M=30, rank=4, ridge=2.0, class_rank=4),
    "afl": AFL(M=30),
    "afcl": AFCL(M=30),
    "centralised_ridge": CentralisedRidge(M=30, ridge=2.0),
}


def scaled(method, trains: bool | str = True):
    return dataclasses.replace(method, scale_scores=trains)


def uneven(seed: int = 0) -> Tasks:
    """Classes of about 80, 40, 20, 10 and 5 samples in two tasks, offset so that scores correlate."""
    rng, tasks = np.random.default_rng(seed), []
    for sizes in ((80, 5, 20), (10, 40)):
        labels = np.repeat(np.arange(len(sizes)) + (3 if tasks else 0), sizes)
        rng.shuffle(labels)
        centres = np.random.default_rng(7).standard_normal((5, 8))
        Z = centres[labels] + rng.standard_normal((len(labels), 8)) + 1
        middle = len(labels) // 2
        tasks.append([(Z[:middle], labels[:middle]), (Z[middle:], labels[middle:])])
    return tasks


def pooled(tasks: Tasks, P: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """H (n, M) and one-hot Y (n, C) of all samples."""
    Z, labels = (np.concatenate(parts) for parts in zip(*(own for task in tasks for own in task), strict=True))
    return Z if P is None else np.maximum(Z @ P, 0), np.eye(labels.max() + 1)[labels]


# The Gaussian sketch knows its class sums only in part.
@pytest.mark.parametrize("name", [name for name in METHODS if name != "gaussian_sketch"])
def test_each_class_is_divided_by_the_root_of_its_own_scores(name):
    """B_c'w_c is the sum of the class's scores over its own samples, n_c q_c; W itself stays."""
    method, tasks = METHODS[name], uneven()
    plain, _ = learn(scaled(method, False), context_of(8), tasks)
    server, classifiers = learn(scaled(method), context_of(8), tasks)
    W = plain.model()["W"].numpy()
    H, Y = pooled(tasks, projection_of(plain))
    own = ((H @ W) * Y).sum(axis=0)
    np.testing.assert_allclose(own, ((H.T @ Y) * W).sum(axis=0), rtol=1e-8)
    assert (own > 0).all()
    assert relative_error(classifiers[-1], W / np.sqrt(own)) < 1e-8
    assert torch.equal(server.W, plain.W)
    Z = np.random.default_rng(1).standard_normal((20, 8))
    expected = np.maximum(Z @ projection_of(plain), 0) @ (W / np.sqrt(own))
    assert relative_error(server.predict(torch.from_numpy(Z)), expected) < 1e-8


@pytest.mark.parametrize("ridge", [1e-6, 1.0, 1e3])
@pytest.mark.parametrize("name", ["stsa", "centred_sketch", "gaussian_sketch"])
def test_energies_under_the_models_own_gram_matrix(name, ridge):
    """w_c'G w_c = B_c'w_c - lambda ||w_c||^2: after scaling at most 1, and 1 as lambda falls, for any class sizes."""
    knob = {"gamma": ridge} if name == "stsa" else {"ridge": ridge}
    method, tasks = dataclasses.replace(METHODS[name], **knob), uneven()
    server, _ = learn(scaled(method), context_of(8), tasks)
    G = server.estimate.matrix.numpy() if name == "stsa" else server.gram().numpy()
    W, B, S = server.W.numpy(), server.B.numpy(), server.model()["W"].numpy()
    energies, own = ((G @ W) * W).sum(axis=0), (B * W).sum(axis=0)
    np.testing.assert_allclose(energies, own - ridge * (W**2).sum(axis=0), rtol=1e-6)
    after = ((G @ S) * S).sum(axis=0)
    np.testing.assert_allclose(after, 1 - ridge * (W**2).sum(axis=0) / own, rtol=1e-6)
    assert (after <= 1 + 1e-9).all()
    if ridge == 1e-6:
        np.testing.assert_allclose(after, 1, rtol=1e-4)
    if name == "stsa":  # G is that of the samples, so these are sums of squared scores
        H, _ = pooled(tasks, projection_of(server))
        np.testing.assert_allclose(np.square(H @ S).sum(axis=0), after, rtol=1e-8)


@pytest.mark.parametrize("ridge", [1e-6, 1.0, 1e3])
@pytest.mark.parametrize("seed", range(3))
def test_q_is_between_zero_and_one_and_bounds_residual_and_own_share(seed, ridge):
    """For the exact Gram matrix."""
    tasks = uneven(seed)
    server, [*_, W] = learn(STSA(M=30, gamma=ridge), context_of(8), tasks)
    H, Y = pooled(tasks, projection_of(server))
    n, scores = Y.sum(axis=0), H @ W.numpy()
    q = (scores * Y).sum(axis=0) / n
    assert (q > 0).all()
    assert (q < 1).all()
    assert (np.square(scores - Y).sum(axis=0) <= n * (1 - q) * (1 + 1e-9)).all()
    share = (np.square(scores) * Y).sum(axis=0) / np.square(scores).sum(axis=0)
    assert (share >= q * (1 - 1e-9)).all()


@pytest.mark.parametrize("ridge", [0.5, 300.0])
def test_features_that_tell_nothing_leave_every_class_equal(ridge):
    """sqrt(n_c q_c) takes the classes' sizes out of the scores; sqrt(q_c) alone would leave their roots."""
    labels = np.repeat(np.arange(4), [100, 50, 7, 1])
    tasks = [[(np.ones((len(labels), 1)), labels)]]
    W = learn(STSA(M=None, gamma=ridge), context_of(1), tasks)[1][0].numpy()
    _, [S] = learn(STSA(M=None, gamma=ridge, scale_scores=True), context_of(1), tasks)
    n = np.bincount(labels)
    np.testing.assert_allclose(W[0], n / (n.sum() + ridge))
    np.testing.assert_allclose(S[0], 1 / np.sqrt(n.sum() + ridge))
    q = W[0]  # the score of every sample
    np.testing.assert_allclose(W[0] / np.sqrt(q), np.sqrt(n / (n.sum() + ridge)))


def test_features_that_tell_everything_keep_their_classes():
    """One direction per class: scores of other classes are 0 before and after."""
    labels = np.repeat(np.arange(3), [60, 9, 1])
    tasks = [[(np.eye(3)[labels], labels)]]
    _, [S] = learn(STSA(M=None, gamma=2.0, scale_scores=True), context_of(3), tasks)
    n = np.array([60, 9, 1])
    np.testing.assert_allclose(S, np.diag(1 / np.sqrt(n + 2.0)), atol=1e-15)


def test_with_a_huge_ridge_it_is_the_cosine_with_the_class_means():
    tasks = uneven()
    server, [*_, S] = learn(STSA(M=30, gamma=1e12, scale_scores=True), context_of(8), tasks)
    H, Y = pooled(tasks, projection_of(server))
    means = H.T @ Y / Y.sum(axis=0)
    expected = means / np.linalg.norm(means, axis=0)
    assert relative_error(S * 1e6, expected) < 1e-6


@pytest.mark.parametrize("M", [None, 30])
def test_scores_do_not_depend_on_the_unit_of_the_features(M):
    """H -> a H with lambda -> a^2 lambda: the same scaled scores."""
    tasks, a = uneven(), 40.0
    _, [*_, S] = learn(STSA(M=M, gamma=2.0, scale_scores=True), context_of(8), tasks)
    larger = [[(a * Z, labels) for Z, labels in clients] for clients in tasks]
    _, [*_, T] = learn(STSA(M=M, gamma=2.0 * a**2, scale_scores=True), context_of(8), larger)
    assert relative_error(a * T, S.numpy()) < 1e-9


def test_copies_of_all_data_divide_all_scores_alike():
    """m copies with lambda -> m lambda: every scaled score by 1 / sqrt(m)."""
    tasks = uneven()
    _, [*_, S] = learn(STSA(M=30, gamma=2.0, scale_scores=True), context_of(8), tasks)
    copied = [[(np.tile(Z, (9, 1)), np.tile(labels, 9)) for Z, labels in clients] for clients in tasks]
    _, [*_, T] = learn(STSA(M=30, gamma=18.0, scale_scores=True), context_of(8), copied)
    assert relative_error(3 * T, S.numpy()) < 1e-9


def test_of_equal_classes_the_sizes_do_not_matter():
    """sqrt(n_c q_c) and sqrt(q_c) then differ by a common factor."""
    rng = np.random.default_rng(3)
    labels = np.repeat(np.arange(4), 20)
    tasks = [[(rng.standard_normal((80, 8)) + np.eye(4, 8)[labels], labels)]]
    server, [S] = learn(STSA(M=30, gamma=2.0, scale_scores=True), context_of(8), tasks)
    H, Y = pooled(tasks, projection_of(server))
    W = server.W.numpy()
    q = ((H @ W) * Y).sum(axis=0) / 20
    assert relative_error(S * np.sqrt(20), W / np.sqrt(q)) < 1e-9


def test_a_class_that_nobody_has_shown_keeps_its_zero_scores():
    """B_c = 0: the product is not positive, the factor 1."""
    tasks = draw_tasks(np.random.default_rng(0), 8, [2], [[20, 10]])
    (Z, labels), other = tasks[0]
    tasks[0] = [(Z, 2 * labels), (other[0], 2 * other[1])]  # columns 0 and 2; nothing of column 1
    server, [S] = learn(STSA(M=30, gamma=2.0, scale_scores=True), context_of(8), tasks)
    assert server.scales is not None
    assert float(server.scales[1]) == 1
    assert not S[:, 1].any()
    assert torch.isfinite(S).all()


def test_length_gives_the_decisions_of_a_cosine_layer():
    """STSA's public code: class c scores h'w_c / (|h| |w_c|); W itself is solved for as without it."""
    tasks = uneven()
    plain, [*_, W] = learn(STSA(M=30, gamma=2.0), context_of(8), tasks)
    server, [*_, U] = learn(scaled(STSA(M=30, gamma=2.0), "length"), context_of(8), tasks)
    W, P = W.numpy(), projection_of(server)
    assert relative_error(U, W / np.linalg.norm(W, axis=0)) < 1e-12
    assert torch.equal(server.W, plain.W)
    Z = np.random.default_rng(1).standard_normal((200, 8)) + 1
    H = np.maximum(Z @ P, 0)
    cosine = (H @ W) / np.linalg.norm(H, axis=1, keepdims=True) / np.linalg.norm(W, axis=0)
    assert np.array_equal(server.predict(torch.from_numpy(Z)).argmax(1).numpy(), cosine.argmax(1))
    assert (cosine.argmax(1) != (H @ W).argmax(1)).any()


def test_length_leaves_a_class_without_weights():
    assert torch.equal(unit_lengths(torch.tensor([[3.0, 0.0], [4.0, 0.0]])), torch.tensor([0.2, 1.0]))


@pytest.mark.slow
def test_length_on_the_shared_features():
    """The figures of docs/errata/stsa.md: A_T of all of CIFAR-100's classes, M 1250."""
    with np.load(shared("data/cifar100-mobilenetv2.npz")) as file:
        Z, labels, test, truth = (torch.from_numpy(file[name]) for name in ("x_train", "y_train", "x_test", "y_test"))
    P = torch.randn(512, 1250, generator=torch.Generator().manual_seed(0))
    H, T = (torch.relu(features.float() @ P) for features in (Z, test))
    Y = torch.nn.functional.one_hot(labels.long()).float()
    G, B, found = (H.T @ H).double(), (H.T @ Y).double(), {}
    for gamma in (1e4, 1e6):
        W = torch.linalg.solve(G + gamma * torch.eye(1250), B)
        scores = T.double() @ W
        right = [(scores * factor).argmax(1) == truth for factor in (1.0, unit_lengths(W))]
        found[gamma] = tuple(round(100 * float(hit.double().mean()), 1) for hit in right)
    assert found == {1e4: (61.2, 61.4), 1e6: (60.0, 61.5)}


def test_another_word_is_told():
    with pytest.raises(UserError, match=r"method\.scale_scores=lengths is not known"):
        typed_instance(STSA, {"scale_scores": "lengths"}, "method")
