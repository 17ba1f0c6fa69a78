"""The engine and the ledger, with a method made for the purpose."""

from __future__ import annotations

import json
import weakref

import numpy as np
import torch

from fcl_bench.data.splits.stream import Stream
from fcl_bench.engine.federation import Federation
from fcl_bench.engine.ledger import Ledger, Upload
from fcl_bench.protocol.message import Message, WireFormat
from fcl_bench.protocol.method import Client, Method, Problem, Server
from fcl_bench.protocol.task import Task


class CountingClient(Client):
    def __init__(self, log):
        self.log = log

    def update(self, shard, broadcast):
        self.log.append((shard.task, int(broadcast["round"]), shard.client, sorted(shard.labels.tolist())))
        return Message({"sum": shard.inputs.sum(dim=0)})


class CountingServer(Server):
    """Two rounds in every task; scores are the first C_t features."""

    def __init__(self, log):
        self.log = log
        self.seen = 0

    def start_task(self, task):
        self.log.append(("start", task.index))
        self.seen = task.columns_seen

    def rounds(self, task):
        return 2

    def broadcast(self, task, round_):
        return Message({"round": torch.tensor(round_)})

    def absorb(self, client_id, message):
        self.log.append(("absorb", client_id, message["sum"].dtype))

    def finish_round(self):
        self.log.append("finish round")

    def finish_task(self):
        self.log.append("finish task")

    def predict(self, inputs):
        return inputs[:, : self.seen]

    def model(self):
        return {}

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        del state


class Counting(Method):
    name = "counting"

    def __init__(self):
        self.log = []

    def client(self, problem):
        return CountingClient(self.log)

    def server(self, problem):
        return CountingServer(self.log)


def federation() -> tuple[Federation, list]:
    """Two tasks of one and two classes; features are one-hot, but sample 3 of the test set is wrong."""
    columns = np.array([0, 0, 1, 2, 1])
    features = torch.eye(3)[columns]
    test = features.clone()
    test[3] = torch.tensor([9.0, 0, 0])
    stream = Stream(
        (Task(0, range(1), 1), Task(1, range(1, 3), 3)),
        np.array([5, 6, 7]),
        columns,
        columns,
        (np.array([0, 1]), np.array([2, 3, 4])),
        (np.array([0, 1]), np.array([2, 3, 4])),
    )
    shards = [
        [np.array([1]), np.array([0]), np.array([], dtype=int)],
        [np.array([2, 4]), np.array([], dtype=int), np.array([3])],
    ]
    method = Counting()
    problem = Problem(3, 0, torch.float64, torch.device("cpu"), WireFormat(torch.float32))
    return Federation(method, problem, stream, shards, np.ones(5, dtype=bool), features, test), method.log


def test_the_engine_runs_tasks_rounds_and_clients_in_order():
    made, log = federation()
    made.run(checkpoint=lambda _: log.append("after"))
    absorbed = torch.float64
    one_round = [(0, 0, 0, [0]), ("absorb", 0, absorbed), (0, 0, 1, [0]), ("absorb", 1, absorbed), "finish round"]
    second = [(0, 1, 0, [0]), ("absorb", 0, absorbed), (0, 1, 1, [0]), ("absorb", 1, absorbed), "finish round"]
    first_task = [("start", 0), *one_round, *second, "finish task", "after"]
    assert log[: len(first_task)] == first_task
    assert log[len(first_task)] == ("start", 1)


def test_no_upload_outlives_its_turn(monkeypatch):
    made, _ = federation()
    uploads: list[weakref.ref[Message]] = []
    alive: list[int] = []
    encode = Message.to_wire

    def encoded(self, wire):
        sent = encode(self, wire)
        alive.append(sum(upload() is not None for upload in uploads))
        uploads.append(weakref.ref(sent))
        return sent

    monkeypatch.setattr(Message, "to_wire", encoded)
    made.run(checkpoint=lambda _: None)
    assert alive == [0] * 8


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
        ledger.add([Upload(task, 0, client, "statistics", 1, 1, 0, 0, 10, 1, seconds)])
    ledger.server_seconds = [10.0, 20.0]
    assert ledger.runtime()["seconds_per_task"] == ((1 + 3) / 2 + 10 + (5 + 0) / 2 + 20) / 2


def test_the_ledger_survives_being_saved():
    made, _ = federation()
    ledger = made.run(checkpoint=lambda _: None).ledger
    restored = Ledger(clients=3)
    restored.restore(json.loads(json.dumps(ledger.state())), ledger.tensors())
    assert restored == ledger
