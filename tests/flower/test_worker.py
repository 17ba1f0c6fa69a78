"""A worker begins each turn with the state that the server names, and keeps those that may be asked for again."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch

from fcl_bench.engine.remote.replies import deserialise, deserialise_reply, serialise
from fcl_bench.engine.transport import Clients
from fcl_bench.flower.node_registry import NodeInfo
from fcl_bench.flower.policy import OPEN
from fcl_bench.flower.refusals import STATE_LOST
from fcl_bench.flower.worker import Site, Turn, Worker, save_name
from fcl_bench.protocol.fields import numbers
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Client, Method
from tests.engine.counting import CONTEXT, CountingServer

RUN = {"id": "abc", "stage": "run", "config": {"transport": {"withdrawal": False}}}


class Turns(Client):
    """Sends how many turns it remembers, and remembers one more."""

    def update(self, client_data, broadcast, state):
        count = state.get("count", torch.tensor(0))
        return Message({"count": count}), {"count": count + 1}


class Remembering(Method):
    name = "remembering"
    log: ClassVar[list] = []

    def uploads(self, context):
        return {"statistics": {"count": numbers()}}

    def client(self, context):
        return Turns()

    def server(self, context):
        return CountingServer(self, context)


@pytest.fixture
def worker(tmp_path):
    return lambda: Worker([0, 1], tmp_path, made, OPEN)


def made(run):
    holdings = [[np.array([0]), np.array([1])]] * 3
    clients = Clients(Remembering(), CONTEXT, holdings, np.zeros(2, dtype=np.int64), np.ones(2, dtype=bool), run="abc")
    return Site(clients, torch.ones(2, 3, dtype=torch.float64), "data")


def counts(worker, save, *turns):
    answers = worker.answer(serialise("turn", ROUNDS[save], run=RUN, seconds=60, turns=[Turn(*turn) for turn in turns]))
    return [int(deserialise_reply(deserialise(blob)).upload["count"]) for blob in answers]


#: The save after each round -> its broadcast.
ROUNDS = {save_name(sent): sent for sent in (Message({}, task=task, round=at) for task, at in ((0, 0), (0, 1), (1, 0)))}
FIRST, SECOND, THIRD = ROUNDS


def test_turns_go_on_from_each_other(worker):
    one = worker()
    assert counts(one, FIRST, (0, None, None), (1, None, None)) == [0, 0]
    assert counts(one, SECOND, (0, FIRST, None)) == [1]
    assert counts(one, THIRD, (0, SECOND, None), (1, FIRST, None)) == [2, 1]


def test_a_turn_done_twice_begins_with_the_same_state(worker):
    one = worker()
    assert counts(one, FIRST, (0, None, None)) == [0]
    assert counts(one, SECOND, (0, FIRST, None)) == [1]
    assert counts(one, SECOND, (0, FIRST, None)) == [1]
    assert counts(one, THIRD, (0, SECOND, None)) == [2]


def test_an_upload_that_was_refused_leaves_the_state_before_it(worker):
    one = worker()
    assert counts(one, FIRST, (0, None, None)) == [0]
    assert counts(one, SECOND, (0, FIRST, None)) == [1]
    assert counts(one, THIRD, (0, FIRST, None)) == [1]


@pytest.mark.parametrize("again", [False, True])
def test_a_server_that_goes_back_to_its_checkpoint_finds_what_clients_kept_then(worker, again):
    one = worker()
    assert counts(one, FIRST, (0, None, None)) == [0]
    assert counts(one, SECOND, (0, FIRST, FIRST)) == [1]
    assert counts(one, THIRD, (0, SECOND, FIRST)) == [2]
    one = worker() if again else one
    assert counts(one, SECOND, (0, FIRST, FIRST)) == [1]


def test_what_nobody_can_ask_for_is_forgotten(worker, tmp_path, caplog):
    one = worker()
    counts(one, FIRST, (0, None, None))
    counts(one, SECOND, (0, FIRST, None))
    counts(one, THIRD, (0, SECOND, SECOND))
    assert sorted(path.parent.name for path in tmp_path.glob("*/*/client-0")) == [SECOND, THIRD]
    (answer,) = counts_of_an_old_state(one)
    assert deserialise(answer).beside == {"clients": [0], "code": STATE_LOST}
    assert "task-0-round-0 lacks what 1 clients stored, client 0 for one" in caplog.text
    one.answer(serialise("delete", run=RUN))
    assert not list(tmp_path.rglob("state.json"))


def counts_of_an_old_state(worker):
    turns = [Turn(0, FIRST, None)]
    return worker.answer(serialise("turn", Message({}, task=1, round=1), run=RUN, seconds=60, turns=turns))


def test_a_node_counts_what_its_clients_have(worker):
    (answer,) = worker().answer(serialise("info", run=RUN))
    info = NodeInfo.read(deserialise(answer).beside)
    assert (info.clients, info.samples, info.labelled) == ([0, 1], [[1, 1]] * 3, [[1, 1]] * 3)
    assert (info.data, info.run) == ("data", "abc")
