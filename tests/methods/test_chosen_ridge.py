"""`ridge=auto` and `ridge=gcv` of the closed-form methods: the number, the solution with it, and what is sent."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fcl_bench.errors import UserError
from fcl_bench.methods.closed_form.afcl import AFCL
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.centralised_ridge import CentralisedRidge
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.methods.closed_form.stsa_e import STSAE
from tests.linalg.test_ridge import plain_scores
from tests.methods.harness import (
    context_of,
    draw_tasks,
    learn,
    on_wire,
    projection_of,
    relative_error,
    shard_of,
    stream_of,
    take_in,
    turn,
)

TASKS = draw_tasks(np.random.default_rng(2), 8, [3, 2], [[40, 15], [25, 30]])
#: Each method so that it keeps the exact Gram matrix, and the name of its knob.
EXACT = {
    "stsa": (STSA(M=30), "gamma"),
    "centralised_ridge": (CentralisedRidge(M=30), "ridge"),
    "afl": (AFL(M=30), "ridge"),
    "afcl": (AFCL(M=30), "ridge"),
    "fedran": (FedRAN(M=30, rank=30), "ridge"),
    "fedran floor": (FedRAN(M=30, rank=30, complement="floor"), "ridge"),
    "centred_sketch": (CentredSketch(M=30, rank=30), "ridge"),
    "stsa_e": (STSAE(M=30, dummy_clients=60, estimator="unbiased"), "gamma"),
}


def samples_of(tasks, P):
    """H (n, M) and the columns (n,) of everyone's samples."""
    pairs = [pair for clients in tasks for pair in clients]
    return np.maximum(np.concatenate([Z for Z, _ in pairs]) @ P, 0), np.concatenate([labels for _, labels in pairs])


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("chosen", ["auto", "gcv"])
def test_the_ridge_is_that_of_all_samples_together(name, chosen):
    method, key = EXACT[name]
    server, classifiers = learn(dataclasses.replace(method, **{key: chosen}), context_of(8), TASKS)
    for last in (1, 2):
        H, labels = samples_of(TASKS[:last], projection_of(server))
        Y, mean = np.eye(labels.max() + 1)[labels], np.square(H).sum() / 30
        ridge = 0.01 * mean
        if chosen == "gcv":
            candidates = mean * 10.0 ** (np.arange(-32, 17) / 4)
            ridge = candidates[plain_scores(H, Y, candidates).argmin()]
        expected = np.linalg.solve(H.T @ H + ridge * np.eye(30), H.T @ Y)
        assert relative_error(classifiers[last - 1], expected) < 1e-6
    assert server.report()["ridge"] == pytest.approx(ridge, rel=1e-6)


def test_a_number_is_not_reported_as_chosen():
    assert "ridge" not in learn(STSA(M=30, gamma=1.0), context_of(8), TASKS)[0].report()


@pytest.mark.parametrize("name", EXACT)
def test_gcv_costs_eight_bytes_where_nothing_sent_counts_the_samples(name):
    method, key = EXACT[name]
    context, sizes = context_of(8, wire="float32"), {}
    for chosen in (1.0, "auto", "gcv"):
        own = dataclasses.replace(method, **{key: chosen})
        server, [task, _] = own.server(context), stream_of(TASKS)
        server.start_task(task)
        if name == "afcl":
            registration = server.broadcast(task, 0)
            take_in(server, 0, turn(own.client(context), shard_of(0, 0, *TASKS[0][0]), registration), task)
        broadcast = server.broadcast(task, server.rounds(task) - 1)
        upload = turn(own.client(context), shard_of(0, 0, *TASKS[0][0]), broadcast)
        sizes[chosen] = on_wire(upload, own, context).nbytes
    counted = name in ("centralised_ridge", "centred_sketch", "stsa_e")
    assert sizes["auto"] == sizes[1.0]
    assert sizes["gcv"] == sizes[1.0] + (0 if counted else 8)


@pytest.mark.parametrize("name", ["stsa", "afl", "fedran"])
def test_an_upload_that_hides_its_samples_is_refused(name):
    method, key = EXACT[name]
    own = dataclasses.replace(method, **{key: "gcv"})
    context, [task, _] = context_of(8), stream_of(TASKS)
    server = own.server(context)
    server.start_task(task)
    upload = turn(own.client(context), shard_of(0, 0, *TASKS[0][0]), server.broadcast(task, 0))
    with pytest.raises(UserError, match="does not say how many samples"):
        take_in(server, 0, dataclasses.replace(upload, samples=None), task)


def test_afl_can_add_a_ridge_after_taking_the_regularisers_out():
    server, [_, W] = learn(AFL(M=30, gamma=3.0, ridge=0.5), context_of(8), TASKS)
    H, labels = samples_of(TASKS, projection_of(server))
    expected = np.linalg.solve(H.T @ H + 0.5 * np.eye(30), H.T @ np.eye(5)[labels])
    assert relative_error(W, expected) < 1e-8


@pytest.mark.parametrize("chosen", ["auto", "gcv"])
def test_without_an_upload_there_is_a_classifier_all_the_same(chosen, caplog):
    method, [task, _] = STSA(M=30, gamma=chosen), stream_of(TASKS)
    server = method.server(context_of(8))
    server.start_task(task)
    server.finish_task()
    assert not server.model()["W"].any()
    assert ("no ridge fits the statistics by gcv" in caplog.text) == (chosen == "gcv")
