"""FedNCM against distances and angles computed one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.methods.closed_form.fedncm import FedNCM
from fcl_bench.methods.closed_form.stsa_e import STSAE
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
    turn,
)

SIMILARITIES = ("cosine", "euclid")


def scores_of(server, X: np.ndarray) -> np.ndarray:
    return server.predict(torch.from_numpy(X)).numpy()


@pytest.mark.slow_cases("cosine")
@pytest.mark.parametrize("similarity", SIMILARITIES)
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(1, 40),
    beta=st.sampled_from([0.05, 0.5, 100]),
    M=st.sampled_from([None, 12]),
)
def test_scores_are_the_centralised_ones_for_any_partition_and_order(similarity, seed, clients, beta, M):
    rng = np.random.default_rng(seed)
    tasks = dealt(rng, draw_tasks(rng, 5, [3, 2], [[60], [50]], offset=1.0), clients, beta)
    method, context = FedNCM(M=M, similarity=similarity), context_of(5)
    server = method.server(context)
    X = rng.standard_normal((20, 5))
    for task, own, (Z, labels) in zip(stream_of(tasks), tasks, oracle.pooled(tasks), strict=True):
        learn_task(method, context, server, task, own, rng.permutation(len(own)))
        P = projection_of(server)
        H, test = (Z, X) if P is None else (np.maximum(Z @ P, 0), np.maximum(X @ P, 0))
        found, expected = scores_of(server, X), oracle.ncm(H, labels, test, similarity)
        alive = np.linalg.norm(test, axis=1) > 0
        assert np.abs(found[alive] - expected[alive]).max() < 1e-8 * max(1, np.abs(expected[alive]).max())


def test_by_hand():
    """Means (2, 0) and (0, 4); the point (3, 2) is nearer to the first, and at a smaller angle to it."""
    Z, labels = np.array([[1.0, 0], [3, 0], [0, 4]]), np.array([0, 0, 1])
    point = np.array([[3.0, 2.0]])
    [euclid, cosine] = [
        scores_of(learn(FedNCM(similarity=similarity), context_of(2), [[(Z, labels)]])[0], point)
        for similarity in ("euclid", "cosine")
    ]
    assert euclid[0] == pytest.approx([3 * 2 - 2, 2 * 4 - 8])
    assert cosine[0] == pytest.approx([3 / 13**0.5, 2 / 13**0.5])
    # A mean of twice the length wins by distance, and changes nothing for the angle.
    far = learn(FedNCM(similarity="euclid"), context_of(2), [[(Z * [4, 1], labels)]])[0]
    assert scores_of(far, point).argmax() == 1
    far = learn(FedNCM(), context_of(2), [[(Z * [4, 1], labels)]])[0]
    assert scores_of(far, point).argmax() == 0


def test_the_sums_are_those_of_stsa_e_added_up_over_its_groups():
    tasks = draw_tasks(np.random.default_rng(2), 6, [4], [[30]])
    context, [task] = context_of(6), stream_of(tasks)
    sent = []
    for method in (FedNCM(M=20), STSAE(M=20, dummy_clients=3)):
        broadcast = method.server(context).broadcast(task, 0)
        sent.append(turn(method.client(context), shard_of(0, 0, *tasks[0][0]), broadcast))
    ours, theirs = sent
    prototypes = theirs["C"].reshape(20, 3, 4).sum(dim=1) / theirs["n"].sum(dim=0)
    assert relative_error(ours["S"] / ours["n"], prototypes.numpy()) < 1e-13
    assert torch.equal(ours["n"], theirs["n"].sum(dim=0).to(torch.int32))


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_a_class_without_a_sample_never_wins(similarity):
    """Column 1 exists and nobody has it; every cosine with the others is negative."""
    Z, labels = np.array([[-1.0, -2], [-2, -1]]), np.array([0, 2])
    server, _ = learn(FedNCM(similarity=similarity), context_of(2), [[(Z, labels)]])
    scores = scores_of(server, np.array([[5.0, 5], [0, 0], [-1, -2]]))
    assert np.isfinite(scores).all()
    assert not (scores.argmax(axis=1) == 1).any()
    assert scores[2].argmax() == 0
