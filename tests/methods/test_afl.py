"""AFL and AFCL against the oracles; invariance to partition, order and number of clients; ranks and regularisers."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.methods.closed_form.afcl import AFCL, AFCLServer
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.centralised_ridge import CentralisedRidge
from tests.methods import afcl_oracle, afl_oracle, stsa_oracle
from tests.methods.harness import (
    context_of,
    dealt,
    draw_tasks,
    learn,
    learn_task,
    over_the_wire,
    random_tasks,
    relative_error,
    shard_of,
    stream_of,
    turn,
)


@pytest.mark.parametrize("ri", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_afl_agrees_with_the_papers_pairwise_form(seed, ri):
    """Erratum 2: with the right signs, the pairwise law is a running sum."""
    tasks, gamma = random_tasks(seed, 30), [1.0, 0.01, 100.0][seed % 3]
    _, classifiers = learn(AFL(gamma=gamma, ri=ri), context_of(8), tasks)
    pairwise = afl_oracle.afl_pairwise(tasks, gamma, ri)
    summed = afl_oracle.afl_running_sum(tasks, gamma, ri)
    for ours, theirs, sums in zip(classifiers, pairwise, summed, strict=True):
        assert relative_error(ours, theirs) < 1e-9
        assert relative_error(ours, sums) < 1e-9


def test_the_printed_weights_of_eq_8_are_not_the_right_ones():
    rng = np.random.default_rng(0)
    C_u, C_v = (X.T @ X for X in rng.standard_normal((2, 20, 5)))
    printed_u, _ = afl_oracle.weights_as_printed(C_u, C_v)
    right_u, right_v = afl_oracle.weights(C_u, C_v)
    np.testing.assert_allclose(right_u + right_v, np.eye(5), atol=1e-12)
    R_u = np.linalg.inv(C_u)
    turned = np.eye(5) - R_u @ C_v + R_u @ C_v @ np.linalg.inv(C_u + C_v) @ C_v
    np.testing.assert_allclose(turned, right_u, atol=1e-12)
    assert np.abs(printed_u - right_u).max() > 0.1


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(1, 200),
    beta=st.sampled_from([0.05, 0.5, 100]),
    method=st.sampled_from(["afl", "afl sums", "afcl"]),
)
def test_any_partition_order_and_number_of_clients_give_the_centralised_solution(seed, clients, beta, method):
    rng = np.random.default_rng(seed)
    tasks = draw_tasks(rng, 6, [3, 2], [[70], [60]])
    upload = "sums" if method == "afl sums" else "solution"
    choice, ridge = (AFCL(gamma=1.0, ridge=0.5), 0.5) if method == "afcl" else (AFL(upload=upload), 0.0)
    _, classifiers = learn(choice, context_of(6), dealt(rng, tasks, clients, beta))
    for ours, theirs in zip(classifiers, stsa_oracle.centralised(tasks, None, ridge), strict=True):
        assert relative_error(ours, theirs) < 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_afcl_agrees_with_the_recursion(seed):
    tasks = random_tasks(seed, 30)
    gamma, ridge = [1.0, 0.1][seed % 2], [None, 2.0, 1e-3][seed % 3]
    server, classifiers = learn(AFCL(gamma=gamma, ridge=ridge), context_of(8), tasks)
    for ours, theirs in zip(
        classifiers, afcl_oracle.afcl(tasks, gamma, gamma if ridge is None else ridge), strict=True
    ):
        assert relative_error(ours, theirs) < 1e-9
    assert isinstance(server, AFCLServer)
    X = np.concatenate([Z for clients in tasks for Z, _ in clients])
    labels = np.concatenate([labels for clients in tasks for _, labels in clients])
    uploads = sum(len(labels) > 0 for clients in tasks for _, labels in clients)
    exact = np.linalg.solve(X.T @ X + uploads * gamma * np.eye(8), X.T @ (labels[:, None] == server.order.numpy()))
    # The Global Knowledge Matrix G_agg^-1 X'Y, its columns in order of registration.
    knowledge = torch.linalg.solve(server.estimate.matrix, server.B[:, server.order])
    assert relative_error(knowledge, exact) < 1e-9


def test_registration_splits_known_from_unknown_classes():
    """Clients register as 2, 0, 1; each upload has its own classes apart from those introduced before."""
    rng = np.random.default_rng(0)
    held = [np.array([0, 1, 1]), np.array([1, 2]), np.array([2, 2, 1])]
    clients = [(rng.standard_normal((len(labels), 4)), labels) for labels in held]
    method, context = AFCL(), context_of(4)
    server, client = method.server(context), method.client(context)
    assert isinstance(server, AFCLServer)
    [task] = stream_of([clients])
    server.start_task(task)
    first = server.broadcast(task, 0)
    assert (first.nbytes, first.stage) == (0, "registration")
    for k in (2, 0, 1):
        registration = turn(client, shard_of(k, 0, *clients[k]), first)
        assert registration["classes"].tolist() == sorted(set(held[k].tolist()))
        server.absorb(k, registration)
    assert server.order.tolist() == [1, 2, 0]
    second = server.broadcast(task, 1)
    assert second.stage == "statistics"
    assert (second["columns"].tolist(), second["owners"].tolist()) == ([1, 2, 0], [2, 2, 0])
    widths = {}
    for k in (0, 1, 2):
        upload = turn(client, shard_of(k, 0, *clients[k]), second)
        widths[k] = (upload["W_known"].shape[1], upload["W_unknown"].shape[1])
        server.absorb(k, upload)
    # Client 2 introduced classes 1 and 2, client 0 class 0 after them, client 1 none.
    assert widths == {2: (0, 2), 0: (2, 1), 1: (2, 0)}
    server.finish_task()
    X, labels = np.concatenate([Z for Z, _ in clients]), np.concatenate(held)
    expected = np.linalg.solve(X.T @ X + np.eye(4), X.T @ np.eye(3)[labels])
    assert relative_error(server.W, expected) < 1e-12


@pytest.mark.parametrize("method", [AFL(), AFCL(ridge=0.3)])
def test_uploads_may_arrive_in_any_order(method):
    """Registration settles the columns; the sums do not depend on who comes first, nor in which round-robin."""
    tasks = draw_tasks(np.random.default_rng(1), 6, [4], [[30, 2, 15, 20]])
    [task] = stream_of(tasks)
    classifiers = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        server = method.server(context_of(6))
        learn_task(method, context_of(6), server, task, tasks[0], order)
        classifiers.append(server.model()["W"])
    for other in classifiers[1:]:
        assert relative_error(other, classifiers[0].numpy()) < 1e-12


def test_an_upload_may_be_late_within_its_task():
    """Registered 0, 1, 2; the statistics arrive 2, 0, 1."""
    tasks = draw_tasks(np.random.default_rng(2), 6, [5], [[20, 12, 15]])
    [task] = stream_of(tasks)
    method, context = AFCL(ridge=0.3), context_of(6)
    server, client = method.server(context), method.client(context)
    server.start_task(task)
    shards = [shard_of(k, 0, *tasks[0][k]) for k in range(3)]
    broadcast = server.broadcast(task, 0)
    for k in range(3):
        server.absorb(k, turn(client, shards[k], broadcast))
    broadcast = server.broadcast(task, 1)
    for k in (2, 0, 1):
        server.absorb(k, over_the_wire(turn(client, shards[k], broadcast), method, context))
    server.finish_task()
    assert relative_error(server.model()["W"], stsa_oracle.centralised(tasks, None, 0.3)[0]) < 1e-9


def test_an_upload_may_even_be_late_for_its_task():
    """Client 1's statistics of the first task arrive in the second: the sums are those of everyone's data."""
    tasks = draw_tasks(np.random.default_rng(2), 6, [3, 2], [[20, 12], [15, 18]])
    first, second = stream_of(tasks)
    method, context = AFCL(ridge=0.3), context_of(6)
    server, client = method.server(context), method.client(context)
    late = None
    for task, clients in ((first, tasks[0]), (second, tasks[1])):
        server.start_task(task)
        shards = [shard_of(k, task.index, *data) for k, data in enumerate(clients)]
        registration = server.broadcast(task, 0)
        for k, client_data in enumerate(shards):
            server.absorb(k, turn(client, client_data, registration))
        second_broadcast = server.broadcast(task, 1)
        uploads = [turn(client, client_data, second_broadcast) for client_data in shards]
        server.absorb(0, uploads[0])
        if task is first:
            late = uploads[1]
        else:
            server.absorb(1, uploads[1])
            server.absorb(1, late)
        server.finish_task()
    assert relative_error(server.model()["W"], stsa_oracle.centralised(tasks, None, 0.3)[-1]) < 1e-9


@pytest.mark.parametrize("dead", [0, 3])
def test_rank_deficient_data_give_the_moore_penrose_solution_and_it_is_told(dead, caplog):
    """More features than samples, or features that are always zero: what is left of C_agg is singular."""
    rng = np.random.default_rng(4)
    tasks = draw_tasks(rng, 60 if dead == 0 else 10, [3], [[8, 1, 12, 0]] if dead == 0 else [[30, 20]])
    for clients in tasks:
        for Z, _ in clients:
            Z[:, :dead] = 0
    with caplog.at_level(logging.WARNING):
        _, [W] = learn(AFL(), context_of(tasks[0][0][0].shape[1]), tasks)
    assert relative_error(W, afl_oracle.moore_penrose(tasks)[0]) < 1e-9
    [told] = [record.message for record in caplog.records]
    assert "Moore-Penrose" in told
    assert "condition number" in told


def test_no_regulariser_on_rank_deficient_clients_is_told_once_and_still_exact(caplog):
    """gamma 0: each client's own solution is its Moore-Penrose one, and C_k W_k is X'Y all the same."""
    tasks = draw_tasks(np.random.default_rng(5), 10, [3], [[4, 3, 20, 6, 5]])
    with caplog.at_level(logging.WARNING):
        _, [W] = learn(AFL(gamma=0.0), context_of(10), tasks)
    assert relative_error(W, stsa_oracle.centralised(tasks, None, 0.0)[0]) < 1e-9
    Z = tasks[0][0][0]
    duplicated = [[(np.concatenate([Z, Z]), np.zeros(8, dtype=int)), tasks[0][2]]]
    with caplog.at_level(logging.WARNING):
        _, [W] = learn(AFL(gamma=0.0), context_of(10), duplicated)
    told = [record.message for record in caplog.records if "a client's own solution" in record.message]
    assert len(told) == 1
    assert "condition number" in told[0]
    assert np.isfinite(W.numpy()).all()


def test_least_squares_in_one_place_is_the_same():
    tasks = random_tasks(2, 30)
    _, afl = learn(AFL(), context_of(8), tasks)
    _, joint = learn(CentralisedRidge(M=None, ridge=0.0), context_of(8), tasks)
    for ours, theirs in zip(afl, joint, strict=True):
        assert relative_error(ours, theirs.numpy()) < 1e-9
