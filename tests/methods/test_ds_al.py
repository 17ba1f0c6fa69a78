"""FedDS-AL against a centralised two-stage program, and its limits."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.errors import UserError
from fcl_bench.methods.closed_form.ds_al import DSAL, DSALServer
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.typed import typed_instance
from tests.methods import ds_al_oracle as oracle
from tests.methods.harness import (
    Tasks,
    context_of,
    dealt,
    draw_tasks,
    learn,
    learn_task,
    projection_of,
    relative_error,
    stream_of,
)
from tests.methods.training_harness import feature_tasks, federation_of


def recurring_tasks(seed: int) -> Tasks:
    """Three tasks; samples of classes 0 and 1 come back in the second, some clients hold nothing."""
    rng = np.random.default_rng(seed)
    first, second, third = draw_tasks(rng, 8, [3, 2, 2], [[30, 0, 9], [25, 14, 1], [0, 12, 30]])
    again = rng.standard_normal((12, 8)), np.arange(12) % 2
    return [first, [*second, again], third]


def learnt_with_both(method: DSAL, context, tasks: Tasks) -> tuple[DSALServer, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The server at the end, and W and W_c after each task."""
    server, found = method.server(context), []
    for task, clients in zip(stream_of(tasks), tasks, strict=True):
        learn_task(method, context, server, task, clients)
        model = server.model()
        found.append((model["W"].clone(), model["W_c"].clone()))
    return server, found


@pytest.mark.slow_cases("0-150", "1-150", "2-150", "3-150")
@pytest.mark.parametrize("M", [None, 20, 150])
@pytest.mark.parametrize("seed", range(4))
def test_both_streams_and_the_scores_agree_with_the_oracle(seed, M):
    """With classes that come back, clients without samples, and more features than samples."""
    tasks = recurring_tasks(seed)
    method = DSAL(M=M, gamma=0.1 * 10**seed, gamma_c=0.3, kappa=0.6 + seed)
    server, found = learnt_with_both(method, context_of(8, seed), tasks)
    P = projection_of(server)
    expected = oracle.ds_al(tasks, P, method.gamma, method.gamma_c)
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours[0], theirs[0]) < 1e-8
        assert relative_error(ours[1], theirs[1]) < 1e-8
    Z = np.random.default_rng(9).standard_normal((40, 8))
    scores = oracle.scores(Z, P, *expected[-1], method.kappa)
    assert relative_error(server.predict(torch.from_numpy(Z)), scores) < 1e-8


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), clients=st.integers(1, 60), beta=st.sampled_from([0.05, 0.5, 100]))
def test_neither_partition_nor_order_changes_either_stream(seed, clients, beta):
    rng = np.random.default_rng(seed)
    tasks, method = draw_tasks(rng, 5, [3, 2], [[60], [50]]), DSAL(M=40)
    server, apart = learnt_with_both(method, context_of(5), dealt(rng, tasks, clients, beta))
    for ours, theirs in zip(apart, oracle.ds_al(tasks, projection_of(server), 0.1, 0.1), strict=True):
        assert relative_error(ours[0], theirs[0]) < 1e-8
        assert relative_error(ours[1], theirs[1]) < 1e-8


@pytest.mark.parametrize("M", [None, 40])
def test_without_weight_the_compensation_changes_nothing_and_stsa_is_left(M):
    tasks, context = recurring_tasks(1), context_of(8)
    ours, _ = learn(DSAL(M=M, gamma=2.0, kappa=0.0), context, tasks)
    theirs, _ = learn(STSA(M=M, gamma=2.0), context, tasks)
    assert torch.equal(ours.model()["W"], theirs.model()["W"])
    Z = torch.from_numpy(np.random.default_rng(2).standard_normal((50, 8)))
    assert torch.equal(ours.predict(Z), theirs.predict(Z))
    assert not torch.equal(learn(DSAL(M=M, gamma=2.0), context, tasks)[0].predict(Z), theirs.predict(Z))


def test_a_main_stream_that_fits_perfectly_leaves_nothing_to_compensate():
    """Labels that are linear in the features, and no ridge: R is 0, and so is W_c."""
    rng = np.random.default_rng(3)
    labels = np.arange(90) % 3
    Z = np.concatenate([np.eye(3)[labels], rng.standard_normal((90, 5))], axis=1)
    Z = Z @ np.linalg.qr(rng.standard_normal((8, 8)))[0]
    tasks = [[(Z[:50], labels[:50]), (Z[50:], labels[50:])]]
    perfect, _ = learn(DSAL(M=None, gamma=0.0), context_of(8), tasks)
    assert isinstance(perfect, DSALServer)
    assert float(perfect.T.abs().max()) < 1e-11
    assert float(perfect.W_c.abs().max()) < 1e-11
    shrunk, _ = learn(DSAL(M=None, gamma=10.0), context_of(8), tasks)
    assert float(shrunk.T.abs().max()) > 0.1


def test_earlier_residuals_stay_as_they_were():
    """The columns of T of classes that do not come back never change, though W does."""
    tasks, context = draw_tasks(np.random.default_rng(4), 6, [3, 2], [[30, 20], [25, 10]]), context_of(6)
    method = DSAL(M=20)
    first, second = stream_of(tasks)
    server = method.server(context)
    learn_task(method, context, server, first, tasks[0])
    T, W = server.T.clone(), server.W.clone()
    learn_task(method, context, server, second, tasks[1])
    assert torch.equal(server.T[:, :3], T)
    assert not torch.allclose(server.W[:, :3], W)


def test_the_compensation_reduces_the_training_residual():
    """The second stage fits what the first left: in the first task, with a heavily shrunk main stream."""
    tasks = draw_tasks(np.random.default_rng(5), 8, [4], [[80, 40]])
    Z, labels = (np.concatenate(parts) for parts in zip(*tasks[0], strict=True))
    errors = []
    for kappa in (0.0, 1.0):
        server, _ = learn(DSAL(M=60, gamma=1e4, kappa=kappa), context_of(8), tasks)
        errors.append(float((server.predict(torch.from_numpy(Z)) - torch.from_numpy(np.eye(4)[labels])).square().sum()))
    assert errors[1] < errors[0] / 2


@pytest.mark.parametrize("wire", [{}, {"gram": "packed"}, {"projection": "matrix"}])
def test_bytes_are_twice_those_of_stsa_up_and_the_columns_of_w_down(wire):
    method, context = DSAL(M=40), context_of(6, wire="float32", **wire)
    federation = federation_of(method, context, feature_tasks(0, [5, 2, 3], [[14, 0, 9], [8, 1, 7], [6, 5, 0]]))
    state = federation.run(lambda _: None)
    rows = [row for row in state.ledger.uploads if row.up_bytes]
    assert len(rows) == 14
    square = 40 * 41 // 2 if wire.get("gram") == "packed" else 40 * 40
    seed = 8 * 6 * 40 if "projection" in wire else 8
    for row in rows:
        classes = [5, 2, 3][row.task]
        assert row.up_bytes == 4 * (square + 40 * classes)
        assert row.stage == ("statistics", "compensation")[row.round]
        assert row.down_bytes == seed + 4 * classes + (0 if row.round == 0 else 8 * 40 * classes)


def test_scaled_scores_scale_both_streams_alike():
    tasks, context = recurring_tasks(7), context_of(8)
    plain, _ = learn(DSAL(M=30), context, tasks)
    scaled, _ = learn(DSAL(M=30, scale_scores=True), context, tasks)
    scales = (plain.B * plain.W).sum(dim=0).rsqrt()
    Z = torch.from_numpy(np.random.default_rng(8).standard_normal((30, 8)))
    torch.testing.assert_close(scaled.predict(Z), plain.predict(Z) * scales)
    model = scaled.model()
    P = projection_of(scaled)
    assert (
        relative_error(scaled.predict(Z), oracle.scores(Z.numpy(), P, *(model[n].numpy() for n in ("W", "W_c")), 0.6))
        < 1e-10
    )


def test_the_numbers_of_samples_are_told_once_for_gcv():
    """In the first round of a task; the second has no number and none is asked for."""
    tasks, context = recurring_tasks(0), context_of(8)
    server, _ = learn(DSAL(M=20, gamma="gcv"), context, tasks)
    assert server.samples == sum(len(labels) for clients in tasks for _, labels in clients)
    assert server.report()["ridge"] == learn(STSA(M=20, gamma="gcv"), context, tasks)[0].ridge


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_coarse_wires_leave_a_useful_classifier(wire):
    tasks = draw_tasks(np.random.default_rng(5), 8, [3, 2], [[60, 50], [50, 1]])
    context = context_of(8, wire=wire, gram="packed", columns="held")
    server, _ = learn(DSAL(M=30, gamma=1.0, gamma_c=1.0), context, tasks)
    Z, labels = (np.concatenate(parts) for parts in zip(*(part for clients in tasks for part in clients), strict=True))
    assert (server.predict(torch.from_numpy(Z)).argmax(dim=1).numpy() == labels).mean() > 0.8


def test_trouble_of_the_second_system_is_told_as_such(caplog):
    """More features than samples and no ridge in the compensation stream alone."""
    tasks = draw_tasks(np.random.default_rng(0), 8, [2], [[20, 3]])
    with caplog.at_level(logging.WARNING):
        server, _ = learn(DSAL(M=60, gamma=1.0, gamma_c=0.0), context_of(8), tasks)
    [told] = [record.message for record in caplog.records]
    assert told.startswith("ds_al, compensation stream: the system is")
    assert server.report()["trouble"] is None
    assert server.report()["compensation"]["trouble"] in told


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"gamma": -1}, "method.gamma=-1.0"),
        ({"gamma_c": -1}, "method.gamma_c=-1.0"),
        ({"kappa": -1}, "method.kappa=-1"),
    ],
)
def test_impossible_knobs_are_refused(knobs, told):
    with pytest.raises(UserError, match=told):
        typed_instance(DSAL, knobs, "method")
