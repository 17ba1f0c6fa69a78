"""`transport=in_process`: all clients in the server's process, one by one or training side by side."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fcl_bench.config import knob
from fcl_bench.engine.checkpoint import ClientStore, resolved
from fcl_bench.engine.codec import RawSamples
from fcl_bench.engine.exchange import Late, Lost, Reply, Stopwatch
from fcl_bench.engine.node import Node, NodeData
from fcl_bench.engine.transport import OPEN_ROUNDS, SYNCHRONOUS, Clients, Connection, Transport, TransportChoice
from fcl_bench.protocol.context import ClientData
from fcl_bench.protocol.message import Message
from fcl_bench.tracking.console import Notices

log = logging.getLogger(__name__)

#: `parallel_clients=auto`.
AUTO = "auto"
#: Clients that train together under `auto` on the CPU, where 8 to 32 take about the same time:
#: docs/results/training_speed.md.
_ON_CPU = 16
#: The most numbers in the features of clients that train together, which stay until their turns: 32 MiB in float64.
MOST_NUMBERS = 2**22


def group_size(parallel: str, device: torch.device) -> int:
    """How many clients of `parallel_clients` train together; 1: one after the other.

    Only sizes and the kind of device count, so that the same command gives the same bits.
    """
    if parallel == AUTO:
        return _ON_CPU if device.type == "cpu" else 1
    return int(parallel)


class BatchedClients:
    """Takes the turns of a node's clients, in their order. Before the first turn of a group the group trains.

    Everything else of a turn is each client's own and happens when it is asked for. The seconds of a joint training are
    dealt to the clients in proportion to their samples.
    """

    def __init__(self, node: Node, size: int, device: torch.device) -> None:
        self._node, self._size, self._device = node, size, device
        self._notices = Notices(log)

    def turns(self, present: Sequence[int], broadcast: Message) -> Iterator[Reply]:
        """The replies of these clients, as of `Node.turn`."""
        alone: str | None = ""
        for group in self._groups(present, broadcast.task):
            seconds, together, counts = dict.fromkeys(group, 0.0), 1, Counter[str]()
            shards: dict[int, ClientData] = {}
            if len(group) > 1 and alone == "":
                shards = {client: self._node.data.client_data(broadcast.task, client) for client in group}
                seconds, alone, counts = self._trained(shards, broadcast)
                together = len(group) if alone == "" else 1
                if alone:
                    text = f"parallel_clients: clients train one after the other, since {alone}"
                    self._notices.tell(alone, text, logging.INFO)
            for client in group:
                self._node.commit()
                reply = self._node.turn(client, broadcast, shards.pop(client, None))
                own = replace(reply, seconds=reply.seconds + seconds[client], together=together, alone=alone or "")
                yield replace(own, counts=own.counts + counts)
                counts = Counter()

    def _trained(
        self, shards: dict[int, ClientData], broadcast: Message
    ) -> tuple[dict[int, float], str | None, Counter[str]]:
        """The seconds of each client in the joint training, why there was none (None: nothing trains), and its counts.

        An attempt that was given up counts nothing: the clients compute it again.
        """
        watch = Stopwatch(self._device)
        with watch.running():
            alone = self._node.train_batched(list(shards.values()), broadcast)
        sizes = {client: max(len(client_data.labels), 1) for client, client_data in shards.items()}
        whole = sum(sizes.values())
        counts = watch.counts if alone == "" else Counter[str]()
        return {client: watch.seconds * size / whole for client, size in sizes.items()}, alone, counts

    def _groups(self, present: Sequence[int], task: int) -> Iterator[list[int]]:
        """Neighbours in the order of turns: at most `size` clients, and no more features than fit."""
        sizes = self._node.data.holdings[task].sizes() * self._node.data.numbers_per_sample
        group: list[int] = []
        for client in present:
            if group and (len(group) == self._size or sizes[[*group, client]].sum() > MOST_NUMBERS):
                yield group
                group = []
            group.append(client)
        if group:
            yield group


class InProcess:
    """All clients in this process, in turn.

    Args:
        store: where processes of clients saved their states, for a run that used several processes before.
        batched: takes turns whose training is done side by side; None: each client does all of its own.
    """

    complete, strangers = True, False

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
        node, device = clients.node(inputs), clients.context.device
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

    def arrivals(self, pending: Iterable[tuple[int, int]], broadcast: Callable[[int], Message]) -> Iterator[Reply]:
        """Under open rounds the replies of pairs of client and task as they come; `broadcast` is that of a task."""
        for client, task in pending:
            self._node.commit()
            yield self._node.turn(client, broadcast(task))

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
    """All clients in the server's process.

    Attributes:
        rounds: `SYNCHRONOUS` or `OPEN_ROUNDS`.
        order: in which uploads come; None: any, drawn by the seed; "own": each client's in the order of its tasks.
        every: after so many uploads the state and the current model are saved, besides after each part of them.
    """

    name: ClassVar[str] = "in_process"
    sees_everything: ClassVar[bool] = True

    rounds: str = knob(SYNCHRONOUS, choices=(SYNCHRONOUS, OPEN_ROUNDS), neutral=SYNCHRONOUS)  # type: ignore[misc]
    order: str | None = knob(None, choices=("own",), neutral=None, of=f"rounds={OPEN_ROUNDS}")  # type: ignore[misc]
    every: int | None = knob(None, least=1, of=f"rounds={OPEN_ROUNDS}", identity=False)  # type: ignore[misc]

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        yield Here()
