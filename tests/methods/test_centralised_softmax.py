"""Pooled softmax regression: conditions of optimality in NumPy, scikit-learn's solution, and what may not matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fcl_bench.methods.closed_form.centralised_softmax import CentralisedSoftmax
from tests.methods.harness import context_of, draw_tasks, learn

TASKS = draw_tasks(np.random.default_rng(3), 6, [3, 2], [[20, 9], [15, 12]])
L2 = 0.01


def pooled(tasks):
    shards = [shard for task in tasks for shard in task]
    return (np.concatenate(part) for part in zip(*shards, strict=True))


def learnt(tasks=TASKS, **knobs):
    server, *_ = learn(CentralisedSoftmax(l2=L2, iterations=500, **knobs), context_of(6), tasks)
    return server


def test_the_gradient_of_the_objective_vanishes():
    """H'(P - Y) / n + l2 W = 0 and 1'(P - Y) = 0, over all samples of both tasks."""
    server, (Z, labels) = learnt(), pooled(TASKS)
    W, b = server.W.numpy(), server.bias.numpy()
    scores = Z @ W + b
    P = np.exp(scores - scores.max(axis=1, keepdims=True))
    P /= P.sum(axis=1, keepdims=True)
    error = P - np.eye(5)[labels]
    np.testing.assert_allclose(Z.T @ error / len(Z) + L2 * W, 0, atol=1e-6)
    np.testing.assert_allclose(error.mean(axis=0), 0, atol=1e-6)
    assert server.report()["largest_gradient"] <= 1e-6


def test_scikit_learn_finds_the_same():
    """Its C is 1 / (n l2); only differences between biases matter."""
    server, (Z, labels) = learnt(), pooled(TASKS)
    theirs = LogisticRegression(C=1 / (len(Z) * L2), tol=1e-10, max_iter=5000).fit(Z, labels)
    np.testing.assert_allclose(server.W.numpy().T, theirs.coef_, atol=2e-4)
    mine = server.bias.numpy()
    np.testing.assert_allclose(mine - mine.mean(), theirs.intercept_ - theirs.intercept_.mean(), atol=2e-4)


def test_clients_and_tasks_do_not_matter():
    shards = [shard for task in TASKS for shard in task]
    backwards = learnt([TASKS[0][::-1], TASKS[1][::-1]])
    at_once = learnt([shards])
    for other in (backwards, at_once):
        torch.testing.assert_close(other.W, learnt().W, atol=2e-4, rtol=0)


def test_a_strong_penalty_leaves_the_classes_shares():
    """W = 0, and the softmax of the biases is each class's share of the samples."""
    server, *_ = learn(CentralisedSoftmax(l2=1e3, iterations=500), context_of(6), TASKS)
    _, labels = pooled(TASKS)
    np.testing.assert_allclose(torch.softmax(server.bias, 0).numpy(), np.bincount(labels) / len(labels), atol=5e-4)
    assert float(server.W.abs().max()) < 1e-3


@pytest.mark.parametrize("M", [None, 16])
def test_the_width_is_that_of_the_features(M):
    assert learnt(M=M).W.shape == (M or 6, 5)
