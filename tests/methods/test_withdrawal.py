"""Clients that are taken out: the classifier is that of a run without them, for every method that allows it."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.ds_al import DSAL
from fcl_bench.methods.closed_form.fedlda import FedLDA
from fcl_bench.methods.closed_form.fedncm import FedNCM
from fcl_bench.methods.closed_form.ranpac import RanPAC
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.options.withdrawal import require_sums, take_out
from tests.methods import stsa_oracle
from tests.methods.harness import (
    context_of,
    draw_tasks,
    learn_task,
    over_the_wire,
    projection_of,
    relative_error,
    shard_of,
    stream_of,
    turn,
)
from tests.small_methods import NAMES, made

METHODS = {
    "stsa": STSA(M=12, gamma=1.0),
    "stsa, gcv": STSA(M=12, gamma="gcv"),
    "ranpac": RanPAC(M=12),
    "ranpac, held out": RanPAC(M=12, ridge="held_out"),
    "afl": AFL(upload="sums"),
    "afl, gcv": AFL(upload="sums", ridge="gcv", scale_scores=True),
    "fedncm": FedNCM(),
    "fedlda": FedLDA(shrinkage=0.1, prior="counts"),
}
#: Three clients, two tasks.
TASKS = draw_tasks(np.random.default_rng(3), 6, [3, 2], [[30, 20, 25], [20, 15, 30]])


def learnt(method, context, clients):
    """The server after both tasks of these clients alone."""
    server = method.server(context)
    for task, held in zip(stream_of(TASKS), TASKS, strict=True):
        learn_task(method, context, server, task, held, clients)
    return server


@pytest.mark.parametrize("name", METHODS)
def test_the_classifier_is_that_of_a_run_without_the_client(name):
    method, leaving = METHODS[name], 1
    context = context_of(6, wire="float64" if name == "stsa" else "float32")
    stream = stream_of(TASKS)
    require_sums(method, context, stream[0])
    server, without = learnt(method, context, (0, 1, 2)), learnt(method, context, (0, 2))
    with_it = server.model()["W"].clone()
    for task, held in zip(stream, TASKS, strict=True):
        with server.in_columns_of(task):
            broadcast = server.broadcast(task, 0)
        upload = turn(method.client(context), shard_of(leaving, task.index, *held[leaving]), broadcast)
        take_out(server, leaving, over_the_wire(upload, method, context), task)
    server.finish_task()
    ours, theirs = server.model(), without.model()
    for part in theirs:
        assert torch.allclose(ours[part], theirs[part], rtol=1e-9, atol=1e-9 * float(theirs[part].abs().max())), part
    assert relative_error(with_it, theirs["W"].numpy()) > 1e-3
    if name == "stsa":
        others = [[held[0], held[2]] for held in TASKS]
        assert relative_error(ours["W"], stsa_oracle.stsa(others, projection_of(server), 1.0)[-1]) < 1e-9


def test_only_methods_whose_server_adds_up_can_forget():
    allowed, task = [], stream_of(TASKS)[0]
    for name in NAMES:
        method = made(name)
        with contextlib.suppress(UserError):
            require_sums(method, context_of(6), task)
            allowed.append(name)
    assert allowed == ["fedlda", "fedncm", "ranpac", "stsa"]


@pytest.mark.parametrize(
    ("method", "changes", "told"),
    [
        (AFL(), {}, "its server does more with W than add .*method.aggregation=sum method.upload=sums"),
        (DSAL(M=12), {}, "uploads depend on those of others"),
        (RanPAC(M=12, ridge="held_out", scope="task"), {}, "uploads depend on those of others"),
        (STSA(M=12), {"sums": True}, "with secure=sums the server never has what one client sent.*secure=none"),
        (STSA(M=12), {"dtype": torch.float32}, "sums in dtype=float32 round too much.*dtype=float64"),
    ],
)
def test_refusals_say_what_would_work(method, changes, told):
    with pytest.raises(UserError, match=f"transport.withdrawal=true: .*{told}"):
        require_sums(method, dataclasses.replace(context_of(6), **changes), stream_of(TASKS)[0])
