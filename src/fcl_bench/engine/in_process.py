"""`transport=in_process`: all clients in the server's process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from fcl_bench.engine.checkpoint import ClientStore, resolved
from fcl_bench.engine.codec import RawSamples
from fcl_bench.engine.exchange import Late, Lost, Reply
from fcl_bench.engine.node import Node, NodeData
from fcl_bench.engine.transport import Clients, Connection, Transport, TransportChoice
from fcl_bench.protocol.message import Message

if TYPE_CHECKING:
    from fcl_bench.engine.batched_clients import BatchedClients


class InProcess:
    """All clients in this process, in turn.

    Args:
        store: where processes of clients saved their states, for a run that used several processes before.
        batched: takes turns whose training is done side by side; None: each client does all of its own.
    """

    complete = True

    def __init__(self, node: Node, store: ClientStore | None = None, batched: BatchedClients | None = None) -> None:
        self._node, self._store, self._batched = node, store, batched
        self.clients, self.most = node.data.clients, 0

    @classmethod
    def of(cls, *parts: Any, **options: Any) -> InProcess:
        """The transport for the clients of a data set: the arguments of `Clients` to `labelled`, and its inputs."""
        *about, inputs = parts
        return cls.over(Clients(*about, **options), inputs)

    @classmethod
    def over(cls, clients: Clients, inputs: torch.Tensor, store: ClientStore | None = None) -> InProcess:
        """The transport for `clients`, as many of them side by side as they are to be."""
        node = clients.node(inputs)
        if clients.parallel == "1":
            return cls(node, store)
        from fcl_bench.engine.batched_clients import BatchedClients, group_size

        device = clients.context.device
        size = group_size(clients.parallel, device)
        return cls(node, store, BatchedClients(node, size, device) if size > 1 else None)

    @property
    def everything(self) -> NodeData:
        return self._node.data

    @property
    def raw(self) -> RawSamples:
        return self._node.data.raw

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        return self._node.data.counts(task)

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Reply | Lost | Late]:
        if self._batched is not None:
            yield from self._batched.turns(present, broadcast)
            return
        for client in present:
            self._node.commit()
            yield self._node.turn(client, broadcast)

    def ask(self, requests: Mapping[int, Message]) -> Iterator[Reply | Lost]:
        for client, request in requests.items():
            yield self._node.answer(client, request)

    def refused(self, client: int) -> None:
        self._node.rollback(client)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._node.state_dict()

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        self._node.load_state_dict(resolved(states, range(self.clients), self._store))


class Here(Connection):
    """The one process."""

    def federate(self, clients: Clients, inputs: torch.Tensor, states: Path) -> Transport:
        # What other processes of the same run saved before is found there.
        return InProcess.over(clients, inputs, ClientStore(states, clients.run))

    def about(self) -> dict[str, Any]:
        return {"processes": 1}


@dataclass
class InOneProcess(TransportChoice):
    """All clients in the server's process."""

    name: ClassVar[str] = "in_process"
    sees_everything: ClassVar[bool] = True

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        yield Here()
