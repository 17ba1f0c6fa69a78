"""FedKLDA: its bandwidth from sums, its classifier against the centralised one, and the limits that it has."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.errors import UserError
from fcl_bench.methods.closed_form.fedklda import FedKLDA
from fcl_bench.methods.closed_form.fedlda import FedLDA
from fcl_bench.protocol.context import Task, TestBatch
from fcl_bench.typed import typed_instance
from tests.methods import discriminant_oracle as oracle
from tests.methods.harness import (
    context_of,
    dealt,
    draw_tasks,
    learn,
    learn_task,
    on_wire,
    relative_error,
    shard_of,
    stream_of,
    take_in,
    turn,
)


def logits(server, Z: np.ndarray, labels: np.ndarray, X: np.ndarray, ensemble: int, **knobs) -> list[np.ndarray]:
    """Scores of X by each map, from the pooled data and the maps that the server says it has."""
    model = {name: tensor.numpy() for name, tensor in server.model().items()}
    maps = zip(*(np.split(model[name], ensemble, axis=-1) for name in ("projection", "phases")), strict=True)
    found = []
    for Omega, u in maps:
        W, b = oracle.lda(oracle.fourier(Z, Omega, u), labels, **knobs)
        found.append(oracle.fourier(X, Omega, u) @ W + b)
    return found


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("ensemble", [1, 3])
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(1, 40),
    beta=st.sampled_from([0.05, 100]),
    knobs=st.sampled_from([{}, {"shrinkage": "oas"}, {"shrinkage": 0.01, "prior": "counts"}]),
)
def test_scores_are_the_centralised_ones_for_any_partition_and_order(ensemble, seed, clients, beta, knobs):
    rng = np.random.default_rng(seed)
    tasks = dealt(rng, draw_tasks(rng, 5, [3, 2], [[60], [50]], offset=1.0), clients, beta)
    method, context = FedKLDA(M=24, ensemble=ensemble, **knobs), context_of(5)
    server, X = method.server(context), rng.standard_normal((20, 5))
    for task, own, (Z, labels) in zip(stream_of(tasks), tasks, oracle.pooled(tasks), strict=True):
        learn_task(method, context, server, task, own, rng.permutation(len(own)))
        if task.index == 0:
            assert server.report()["bandwidth"] == pytest.approx(oracle.mean_squared_distance(Z) ** 0.5, rel=1e-9)
        parts = logits(server, Z, labels, X, ensemble, **knobs)
        found = server.predict(torch.from_numpy(X)).numpy()
        if ensemble == 1:
            assert np.abs(found - parts[0]).max() < 1e-8 * np.abs(parts[0]).max()
        else:
            expected = np.mean([oracle.softmax(part) for part in parts], axis=0)
            assert np.abs(np.exp(found) - expected).max() < 1e-8


def test_a_huge_bandwidth_is_the_linear_discriminant():
    """cos(z'w + u) = cos u - sin(u) z'w + O(|z|^2 / b^2): affine in z.

    The features' variance is of order b^-2 in d directions and b^-4 in the others, so with a share of b^-3 the former
    count in full and the latter not at all, each but for a part of order 1/b.
    """
    rng = np.random.default_rng(0)
    tasks, X = draw_tasks(rng, 4, [3, 2], [[70, 50], [60, 40]]), 2 * rng.standard_normal((200, 4))
    linear = learn(FedLDA(shrinkage=0.0), context_of(4), tasks)[0].predict(torch.from_numpy(X)).numpy()
    linear -= linear.mean(axis=1, keepdims=True)
    errors = []
    for bandwidth in (1e1, 1e3, 1e4):
        method = FedKLDA(M=60, bandwidth=bandwidth, shrinkage=bandwidth**-3)
        server, _ = learn(method, context_of(4), tasks)
        scores = server.predict(torch.from_numpy(X)).numpy()
        scores -= scores.mean(axis=1, keepdims=True)
        errors.append(np.abs(scores - linear).max() / np.abs(linear).max())
    assert errors[0] > 0.1
    assert errors[1] < 0.05
    assert errors[2] < 2e-3


def test_it_tells_a_ball_from_the_shell_around_it_which_no_line_does():
    rng = np.random.default_rng(0)

    def rings(samples: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(samples) % 2
        Z = rng.standard_normal((samples, 3))
        return Z / np.linalg.norm(Z, axis=1, keepdims=True) * (1 + 2 * labels)[:, None], labels

    tasks, (X, truth) = [[rings(200), rings(200)]], rings(400)
    share = {}
    for method in (FedLDA(), FedKLDA(M=200), FedKLDA(M=200, ensemble=3)):
        server, _ = learn(method, context_of(3), tasks)
        hits = server.predict(torch.from_numpy(X)).argmax(dim=1).numpy() == truth
        share[method.name, method.maps] = hits.mean()
    assert share["fedlda", 1] < 0.65
    assert share["fedklda", 1] > 0.95
    assert share["fedklda", 3] > 0.95


def test_the_exchange_before_the_first_task():
    """d + 2 numbers up, nothing down; 8 bytes of bandwidth beside the seed in each later broadcast."""
    tasks = draw_tasks(np.random.default_rng(0), 6, [3, 2], [[20], [20]])
    context, (first, second) = context_of(6, wire="float32"), stream_of(tasks)
    for knobs, stages in (
        ({}, ["bandwidth", "statistics"]),
        ({"bandwidth": 2.5}, ["statistics"]),
    ):
        method = FedKLDA(M=20, **knobs)
        server = method.server(context)
        assert list(server.stages(first)) == stages
        assert server.rounds(second) == 1
        learn_task(method, context, server, first, tasks[0])
        assert float(server.broadcast(second, 0)["bandwidth"]) == server.report()["bandwidth"] == server.bandwidth
    method = FedKLDA(M=20)
    server, client = method.server(context), method.client(context)
    asked = server.broadcast(first, 0)
    assert asked.nbytes == 0
    upload = on_wire(turn(client, shard_of(0, 0, *tasks[0][0]), asked), method, context)
    assert upload.nbytes == 4 * (6 + 1) + 4
    learn_task(method, context, server, first, tasks[0])
    assert server.broadcast(second, 0).nbytes == 8 + 8 + 4 * 2


def test_the_whole_projection_on_the_wire_is_the_same_map():
    tasks = draw_tasks(np.random.default_rng(0), 6, [3, 2], [[20, 30], [20, 10]])
    [seed, matrix] = [
        learn(FedKLDA(M=20, ensemble=2), context_of(6, projection=kind), tasks)[0].model()
        for kind in ("seed", "matrix")
    ]
    assert all(torch.equal(tensor, matrix[name]) for name, tensor in seed.items())


def test_samples_that_are_all_alike_are_told_and_give_finite_scores(caplog):
    Z, labels = np.full((10, 4), 3.0), np.arange(10) % 2
    with caplog.at_level(logging.WARNING):
        server, _ = learn(FedKLDA(M=20), context_of(4), [[(Z, labels)]])
    assert "the samples' distances are lost in rounding" in caplog.records[0].message
    assert "method.bandwidth=NUMBER" in caplog.records[0].message
    assert server.bandwidth > 0
    assert torch.isfinite(server.predict(torch.from_numpy(Z))).all()


@pytest.mark.parametrize("ensemble", [1, 2])
def test_an_absent_class_never_wins(ensemble):
    rng = np.random.default_rng(0)
    Z, labels = rng.standard_normal((40, 4)), 2 * (np.arange(40) % 2)
    server, _ = learn(FedKLDA(M=20, ensemble=ensemble), context_of(4), [[(Z, labels)]])
    scores = server.predict(torch.from_numpy(Z))
    assert torch.isfinite(scores).all()
    assert not (scores.argmax(dim=1) == 1).any()


def test_posteriors_of_hopeless_classes_are_still_ranked():
    """Their logarithm is what is averaged: exp(-800) would be zero, and all of them equal."""
    rng = np.random.default_rng(0)
    Z = np.repeat(100 * rng.standard_normal((6, 4)), 20, axis=0) + 0.01 * rng.standard_normal((120, 4))
    server, _ = learn(FedKLDA(M=30, ensemble=2, shrinkage=1e-9), context_of(4), [[(Z, np.repeat(np.arange(6), 20))]])
    scores = server.predict(torch.from_numpy(Z[:1]))
    assert float(scores.min()) < -800
    assert len(scores.unique()) == 6


def test_where_nobody_has_samples_in_the_first_task_the_next_one_is_asked(caplog):
    """The bandwidth stayed 1 without a word."""
    tasks = draw_tasks(np.random.default_rng(0), 6, [3, 2, 2], [[20, 9], [30, 8], [10, 7]], offset=1.0)
    method, context = FedKLDA(M=20), context_of(6)
    stream, server = stream_of(tasks), method.server(context)
    learn_task(method, context, server, stream[0], [(Z[:0], labels[:0]) for Z, labels in tasks[0]])
    server.start_task(stream[1])
    assert server.rounds(stream[1]) == 2
    # Interrupted after the round that asks for the bandwidth, it goes on with the next one.
    clients = [method.client(context) for _ in tasks[1]]
    for k, (Z, labels) in enumerate(tasks[1]):
        upload = turn(clients[k], shard_of(k, 1, Z, labels), server.broadcast(stream[1], 0))
        take_in(server, k, on_wire(upload, method, context), stream[1])
    server.finish_round()
    again = method.server(context)
    again.load_state_dict({name: tensor.clone() for name, tensor in server.state_dict().items()})
    again.start_task(stream[1])
    assert again.rounds(stream[1]) == 2
    assert again.broadcast(stream[1], 1).stage == server.broadcast(stream[1], 1).stage
    # Without interruption:
    server = method.server(context)
    learn_task(method, context, server, stream[0], [(Z[:0], labels[:0]) for Z, labels in tasks[0]])
    tested = torch.from_numpy(tasks[2][0][0])
    server.classify(TestBatch(lambda: tested, number=0))
    learn_task(method, context, server, stream[1], tasks[1])
    assert torch.equal(server.classify(TestBatch(lambda: tested, number=0)).scores, server.predict(tested))
    # An answer that comes only now would need the stages that the first task had.
    assert server.stages(stream[0])[0] == "bandwidth"
    assert server.late_stage(stream[0], 0) is None
    Z = np.concatenate([Z for Z, _ in tasks[1]])
    assert server.bandwidth == pytest.approx(oracle.mean_squared_distance(Z) ** 0.5, rel=1e-9)
    server.start_task(stream[2])
    assert server.rounds(stream[2]) == 1
    assert not caplog.records


def test_statistics_that_come_before_the_bandwidth_are_told(caplog):
    tasks = draw_tasks(np.random.default_rng(0), 6, [3], [[20]])
    method, context = FedKLDA(M=20), context_of(6)
    [task], server = stream_of(tasks), method.server(context)
    server.start_task(task)
    server.finish_round()  # everyone was silent
    upload = turn(method.client(context), shard_of(0, 0, *tasks[0][0]), server.broadcast(task, 1))
    take_in(server, 0, on_wire(upload, method, context), task, 1)
    server.finish_round()
    server.finish_task()
    assert "fedklda: nobody had answered before the first statistics came, so there is a bandwidth of 1" in caplog.text
    server.start_task(Task(1, task.columns, 3, tuple(task.columns)))
    assert server.rounds(Task(1, task.columns, 3, tuple(task.columns))) == 1


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"bandwidth": 0}, "method.bandwidth=0.0 is out of range"),
        ({"bandwidth": "median"}, "method.bandwidth=median is not known"),
        ({"ensemble": 0}, "method.ensemble=0 is out of range"),
    ],
)
def test_knobs_that_can_not_be(knobs, told):
    with pytest.raises(UserError) as error:
        typed_instance(FedKLDA, knobs, "method")
    assert str(error.value).startswith(told)


def test_one_map_of_an_ensemble_in_a_run_of_its_own():
    """Each map has its own discriminants: their mean posterior is that of runs with one map each."""
    tasks = draw_tasks(np.random.default_rng(0), 6, [3, 2], [[20, 30], [20, 10]])
    server, _ = learn(FedKLDA(M=20, ensemble=3, bandwidth=4.0), context_of(6), tasks)
    model = server.model()
    assert model["W"].shape == (60, 5)
    assert model["bias"].shape == (3, 5)
    *_, (Z, labels) = oracle.pooled(tasks)
    for e, (Omega, u) in enumerate(zip(model["projection"].chunk(3, dim=1), model["phases"].chunk(3), strict=True)):
        W, b = oracle.lda(oracle.fourier(Z, Omega.numpy(), u.numpy()), labels)
        assert relative_error(model["W"].chunk(3)[e], W) < 1e-8
        assert relative_error(model["bias"][e], b) < 1e-8
