"""The ClientApp: one turn of one client per message, on what the user's own loader gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import flwr.clientapp
import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fcl_bench.backbones.backbone import Trainable
from fcl_bench.data.partitions.base import Holdings
from fcl_bench.engine.codec import Codec
from fcl_bench.engine.node import UNKNOWN, Node, NodeData
from fcl_bench.errors import UserError
from fcl_bench.flower.app import records
from fcl_bench.flower.app.body import Body, as_columns, as_inputs
from fcl_bench.flower.app.plan import halves
from fcl_bench.flower.app.transport import About
from fcl_bench.linalg.tensors import with_prefix
from fcl_bench.protocol import context as protocol
from fcl_bench.protocol.fields import Uploads
from fcl_bench.protocol.method import Client

#: A client's samples of a task, given Flower's context and the task's number from 0: inputs and labels (n,). The
#: inputs are features (n, d), or images (n, 3, h, w) or (n, h, w) in uint8; the label -1 stands for none.
Load = Callable[[Context, int], tuple[Any, Any]]
#: Mods that do nothing of use by themselves, and what each needs.
_AT_SERVER = {
    **dict.fromkeys(("fixedclipping_mod", "adaptiveclipping_mod"), "a strategy"),
    **dict.fromkeys(("secagg_mod", "secaggplus_mod"), "a workflow"),
}
#: The record of a node's state that has what its client retains.
_STATE = "fcl-bench"


class _Half:
    """What a process needs for turns in one run.

    Args:
        text: the run, as JSON (see `plan.halves`).
        body: the network of the app.
    """

    def __init__(self, text: str, body: Body | None) -> None:
        self.run = json.loads(text)
        self.body: Trainable | None = None if body is None else body.trainable(self.run["seed"])
        self.method, self.context = halves(self.run, self.body)
        self.uploads = Uploads.of(self.method, self.context)
        self.client: Client = self.method.client(self.context)

    def node(self, client: int, task: int, inputs: torch.Tensor, columns: np.ndarray) -> Node:
        """A node that has one client's samples of one task."""
        ends = np.where(np.arange(self.run["clients"] + 1) > client, len(columns), 0)
        # It is asked for one task alone; what it says of the others does not count.
        holdings = [Holdings(np.arange(len(columns)), ends)] * (task + 1)
        data = NodeData(self.context, holdings, columns, inputs)
        return Node(self.client, self.context, data, Codec(self.uploads, self.context.wire), self.uploads)


def ClientApp(load: Load, *, network: Body | None = None, mods: list[Any] | None = None) -> flwr.clientapp.ClientApp:
    """A ClientApp that is the clients of a method: each node is one, whose number is its `partition-id`.

    Args:
        load: gives a client's samples.
        network: of methods that train one, or whose features are those of the loader's images; the server's, too.
        mods: of Flower, around the turns.

    Raises:
        UserError: a mod that needs a workflow of Flower's own at the server.
    """
    names = [getattr(mod, "__name__", type(mod).__name__) for mod in mods or []]
    for name in names:
        if name in _AT_SERVER:
            raise UserError(
                f"{name} needs {_AT_SERVER[name]} of Flower's at the server, whose place the method takes",
                "LocalDpMod, or noise=gaussian and secure=sums of fcl-bench, over transport=flower",
            )
    app = flwr.clientapp.ClientApp()

    @app.query()
    def census(message: Message, context: Context) -> Message:
        """Who the client is, and how many samples it has in each task."""
        config: Any = message.content.config_records[records.CONFIG]
        numbers = _numbers(context)
        loaded = [load(context, task) for task in range(config["tasks"])]
        known = [int((np.asarray(labels) != UNKNOWN).sum()) for _, labels in loaded]
        features = np.shape(loaded[0][0])[1] if np.ndim(loaded[0][0]) == 2 else 0
        about = About(*numbers, features, [len(labels) for _, labels in loaded], known)
        weights = records.NONE if network is None else network.trainable(config["seed"]).identity["weights"]
        found = {records.METRICS: MetricRecord(about._asdict()), records.CONFIG: ConfigRecord({"network": weights})}
        return Message(RecordDict(found), reply_to=message)

    @app.train(mods=mods)
    def turn(message: Message, context: Context) -> Message:
        """One turn of the client; what it retains is in the node's state afterwards."""
        config: Any = message.content.config_records[records.CONFIG]
        (client, _), broadcast = _numbers(context), records.broadcast_of(message.content)
        half = _half(config["run"], network)
        given, labels = load(context, broadcast.task)
        order = half.run["order"][: half.run["seen"][broadcast.task]]
        columns = as_columns(labels, order, f"client {client}, task {broadcast.task}")
        inputs = as_inputs(given, half.body, half.method.trains_network, half.context)
        node = half.node(client, broadcast.task, inputs, columns)
        before = _stored(context, config["begin"])
        node.resume(client, before)
        with node.computing():
            reply = node.turn(client, broadcast)
        after = node.keeps(client)
        saves = {config["begin"]: before, config["end"]: after}
        named = {f"{save}/{name}": own for save, state in saves.items() for name, own in state.items()}
        context.state[_STATE] = records.arrays(named)
        if "LocalDpMod" in names and reply.upload.keys() != message.content.array_records[records.ARRAYS].keys():
            raise UserError(
                f"LocalDpMod clips models, and method={half.method.name} sends something else ({broadcast.stage})",
                "a method that only averages models, such as fedavg",
            )
        about = {"num-examples": len(columns), "seconds": reply.seconds, "stored": sum(reply.stored.values())}
        return Message(records.reply(reply.upload, about | dict(reply.counts)), reply_to=message)

    return app


@lru_cache(maxsize=1)
def _half(text: str, body: Body | None) -> _Half:
    """One per process: in a simulation each message brings a copy of the app, and a process has the turns of many."""
    return _Half(text, body)


def _numbers(context: Context) -> tuple[int, int]:
    """The number of a node's client, and how many clients there are."""
    found = [context.node_config.get(key) for key in ("partition-id", "num-partitions")]
    client, clients = (int(value) if isinstance(value, int) else -1 for value in found)
    if not 0 <= client < clients:
        raise UserError(
            f"the node's partition-id={found[0]} and num-partitions={found[1]} are no number of a client",
            "flower-supernode --node-config 'partition-id=0 num-partitions=3'",
        )
    return client, clients


def _stored(context: Context, save: str) -> protocol.State:
    """What the client retained after the turn of this name; nothing before its first. Raises a `UserError`: lost."""
    if save == records.NONE:
        return {}
    record = context.state.get(_STATE, ArrayRecord())
    assert isinstance(record, ArrayRecord)
    found = with_prefix(records.tensors(record), f"{save}/")
    if not found:
        raise UserError(f"what the client retained after {save} is gone", "a node that runs until the run's end")
    return found
