"""The engine and the ledger, with a method made for the purpose."""

from __future__ import annotations

import json
import weakref

import numpy as np
import torch

from fcl_bench.engine.codec import Chain, Codec, Middleware
from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.ledger import Ledger
from fcl_bench.engine.node import Node, NodeData
from fcl_bench.protocol.audit import Audit
from fcl_bench.protocol.fields import Uploads
from fcl_bench.protocol.message import Message
from tests.engine.counting import federation


def test_the_engine_runs_tasks_rounds_and_clients_in_order():
    made, log = federation()
    made.run(checkpoint=lambda _: log.append("after"))
    absorbed = torch.float64
    one_round = [(0, 0, 0, [0]), ("absorb", 0, absorbed), (0, 0, 1, [0]), ("absorb", 1, absorbed), "finish round"]
    second = [(0, 1, 0, [0]), ("absorb", 0, absorbed), (0, 1, 1, [0]), ("absorb", 1, absorbed), "finish round"]
    first_task = [("start", 0), *one_round, *second, "finish task", "after"]
    assert log[: len(first_task)] == first_task
    assert log[len(first_task)] == ("start", 1)


def test_a_server_may_ask_clients_without_samples_of_the_task():
    """Client 1 has a turn in the second task, with an empty shard; audits see what clients learn from, so not that."""
    seen = []

    class Noting(Audit):
        rows = ()

        def observe(self, task, client_data):
            seen.append((task.index, client_data.client))

        def report(self, task, server, everything):
            pass

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    made, log = federation(audits={"noting": Noting()})
    made.server.participants = lambda task, round_, available: sorted({*available, task.index})
    made.run(lambda _: None)
    assert [entry for entry in log if entry[0] == 1 and entry[2] == 1] == [(1, 0, 1, []), (1, 1, 1, [])]
    rows = [row for row in made.state.ledger.uploads if (row.task, row.client) == (1, 1)]
    assert [(row.samples, row.labelled, row.up_bytes) for row in rows] == [(0, 0, 12)] * 2
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 2)]


class Watching(Middleware):
    """Notes, whenever a message passes, how many of those before it are still there."""

    def __init__(self):
        self._passed: list[weakref.ref[Message]] = []
        self.alive: list[int] = []

    def _note(self, message):
        self.alive.append(sum(earlier() is not None for earlier in self._passed))
        self._passed.append(weakref.ref(message))
        return message

    def send(self, message, client):
        return message if client is None else self._note(message)

    def receive(self, message, client):
        return self._note(message) if "sum" in message else message


def test_no_upload_outlives_its_turn():
    """Neither as it was made, nor on the wire, nor as the server has it."""
    made, wire, received = Watching(), Watching(), Watching()

    def transport(method, context, shards, columns, labelled, inputs):
        data = NodeData(context, shards, columns, inputs)
        uploads = Uploads.of(method, context)
        chain = Chain([made, Codec(uploads, context.wire), wire])
        return InProcess(Node(method.client(context), context, data, chain, uploads))

    running, _ = federation(transport=transport, middleware=[received])
    running.run(checkpoint=lambda _: None)
    assert [made.alive, wire.alive, received.alive] == [[0] * 8] * 3


def test_right_answers_are_counted_per_task():
    made, _ = federation()
    state = made.run(checkpoint=lambda _: None)
    np.testing.assert_array_equal(state.answers["correct"], [[2, 0], [2, 2]])


def test_every_exchange_is_a_row_and_an_empty_client_sends_nothing():
    made, _ = federation()
    ledger = made.run(checkpoint=lambda _: None).ledger
    assert len(ledger.uploads) == 2 * 2 * 3
    by_client = {(row.task, row.round, row.client): row for row in ledger.uploads}
    assert by_client[0, 0, 0].up_bytes == 3 * 4  # float32 on the wire
    assert by_client[0, 0, 0].down_bytes == 8
    empty = by_client[0, 0, 2]
    assert (empty.samples, empty.up_bytes, empty.down_bytes, empty.client_seconds) == (0, 0, 0, 0)
    assert ledger.communication()["up_max_bytes"] == 2 * 12  # two rounds
    assert ledger.communication()["up_total_max_bytes"] == 4 * 12  # client 0, two tasks
    assert ledger.communication()["up_total_bytes"] == 8 * 12


def test_seconds_per_task_is_equation_1():
    ledger = Ledger(clients=2)
    for task, client, seconds in [(0, 0, 1.0), (0, 1, 3.0), (1, 0, 5.0), (1, 1, 0.0)]:
        counts = ("samples", "labelled", "accepted", "right", "up_bytes", "down_bytes")
        columns = dict.fromkeys((*counts, "one_sample_sums", "one_sample_moments"), 1)
        ledger.add_round(task, 0, "statistics", {**columns, "client": client, "client_seconds": seconds})
    ledger.server_seconds = [10.0, 20.0]
    assert ledger.runtime()["seconds_per_task"] == ((1 + 3) / 2 + 10 + (5 + 0) / 2 + 20) / 2


def test_the_ledger_survives_being_saved():
    made, _ = federation()
    ledger = made.run(checkpoint=lambda _: None).ledger
    restored = Ledger(clients=3)
    restored.restore(json.loads(json.dumps(ledger.state())), ledger.tensors())
    assert restored.uploads == ledger.uploads
    assert restored.server_seconds == ledger.server_seconds
