"""A method made for the purpose, and a federation of three clients over two tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from fcl_bench.data.splits.base import Stream
from fcl_bench.engine.codec import Middleware
from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.loop import Federation
from fcl_bench.engine.transport import Transport
from fcl_bench.protocol.audit import Audit
from fcl_bench.protocol.context import Context, Task, WireFormat
from fcl_bench.protocol.fields import SUM, SUMS, real
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Client, Method, Server

CONTEXT = Context(3, 0, torch.float64, torch.device("cpu"), WireFormat(torch.float32))


class CountingClient(Client):
    def __init__(self, log):
        self.log = log

    def update(self, client_data, broadcast, state):
        self.log.append(
            (client_data.task, int(broadcast["round"]), client_data.client, sorted(client_data.labels.tolist()))
        )
        return Message({"sum": client_data.inputs.sum(dim=0)}), state


class CountingServer(Server):
    """Two rounds in every task; scores are the first C_t features."""

    state = ("total",)

    def __init__(self, method, context):
        self.method, self.context, self.log = method, context, method.log
        self.seen = 0
        self.total = torch.zeros(3, dtype=torch.float64)

    def start_task(self, task):
        self.log.append(("start", task.index))
        self.seen = task.columns_seen

    def rounds(self, task):
        return 2

    def broadcast(self, task, round_):
        return Message({"round": torch.tensor(round_)})

    def absorb(self, client_id, message):
        self.log.append(("absorb", client_id, message["sum"].dtype))
        self.total += message["sum"]

    def finish_round(self):
        self.log.append("finish round")

    def finish_task(self):
        self.log.append("finish task")

    def predict(self, inputs):
        return inputs[:, : self.seen]

    def model(self):
        return {}


class Counting(Method):
    name = "counting"

    def __init__(self, client: type[CountingClient] = CountingClient):
        self.log = []
        self._client = client

    def client(self, context):
        return self._client(self.log)

    def server(self, context):
        return CountingServer(self, context)

    def uploads(self, context):
        return {"statistics": {"sum": real(3, combine=SUM, leaks=SUMS)}}


def federation(
    client: type[CountingClient] = CountingClient,
    transport: Callable[..., Transport] = InProcess.of,
    audits: Mapping[str, Audit] | None = None,
    middleware: Sequence[Middleware] = (),
) -> tuple[Federation, list]:
    """Two tasks of one and two classes; features are one-hot, but sample 3 of the test set is wrong.

    Args:
        client: the client half, which gets the log.
        transport: makes one of what `InProcess.of` takes.
        audits, middleware: of the federation.
    """
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
    method = Counting(client)
    made = transport(method, CONTEXT, shards, columns, np.ones(5, dtype=bool), features)
    return Federation(method, CONTEXT, stream, made, test, audits, middleware), method.log
