"""Flower's grid and its nodes in this process: what is sent passes Flower's own serialisation, and what a test loses
is lost."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.task_identity import TaskIdentity

#: Called with the number of a client and what it is asked; it may return what becomes of the reply.
Before = Callable[[int, Message], "Message | None"]


def _unused(*_: Any, **__: Any) -> Any:
    raise AssertionError("an app asks a grid for nodes, and pushes and pulls messages, and does nothing else with it")


class FakeGrid(Grid):
    """Stands for a SuperLink with a node for each of `count` clients, in another order than the clients'."""

    def __init__(self, app: ClientApp, count: int) -> None:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        self.app = app
        config: Any = {"num-partitions": count}
        self.nodes = {
            1000 - k: Context(1, 1000 - k, {**config, "partition-id": k}, RecordDict(), {}) for k in range(count)
        }
        #: Called before a client answers with its number and the message; None as its answer: it stays silent.
        self.answering: Callable[[int, Message, Callable[[], Message]], Message | None] = (
            lambda client, message, answer: answer()
        )
        self._numbers = itertools.count(1)
        self._waiting: dict[str, Message] = {}
        #: A process of Flower's does one thing at a time.
        self._at_work = threading.Lock()

    #: What else a grid has, which no app of fcl-bench may use.
    set_run = create_message = send_and_receive = _unused
    run = property(_unused)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            if message.metadata.dst_node_id in self.nodes:
                message.metadata.__dict__["_message_id"] = name = f"message-{next(self._numbers)}"
                self._waiting[name] = _sent(message)
                names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for name in [name for name in message_ids if name in self._waiting]:
            message = self._waiting[name]
            context = self.nodes[message.metadata.dst_node_id]
            reply = self.answering(
                context.node_config.get("partition-id"), message, lambda m=message, c=context: self._answer(m, c)
            )
            if reply is not None:
                del self._waiting[name]
                replies.append(_sent(reply))
        return replies

    def _answer(self, message: Message, context: Context) -> Message:
        try:
            with self._at_work:
                return self.app(message, context)
        except Exception as error:
            return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)


def _sent(message: Message) -> Message:
    return message_from_proto(message_to_proto(message))


def run(server: ServerApp, grid: FakeGrid, run_config: Mapping[str, Any] | None = None) -> Context:
    context = Context(1, 1, {}, RecordDict(), dict(run_config or {}))
    server(grid, context)
    return context
