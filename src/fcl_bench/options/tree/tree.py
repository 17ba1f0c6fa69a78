"""Aggregators between the clients and the server: each combines its children's uploads into one and sends that on.

With a fan-in f, client k sends to node k // f of level 1, node j of a level to node j // f of the next, and the nodes
of the last level, f at most, to the server. A node does to its children's uploads what the server would do before it
absorbs them (decode, check), combines them as the method says (`protocol.combining`) and encodes the result as a client
does. A single upload is passed on, not combined. The server absorbs what comes from the last level; with no more than f
clients there is no node, and it absorbs their own uploads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fcl_bench.engine.broadcast_cache import Kept
from fcl_bench.engine.checkpoint import GROWING
from fcl_bench.engine.ledger import Stopwatch
from fcl_bench.engine.middleware import Middleware
from fcl_bench.engine.node import Late, Lost, Reply
from fcl_bench.engine.reports import TreeLevel, TreeReport
from fcl_bench.engine.rows import Rows
from fcl_bench.protocol.combining import Combination
from fcl_bench.protocol.fields import SampleCounts
from fcl_bench.protocol.message import Message

#: A row of nodes.csv: what one node did in one round. `received` messages came up to it, and `sent` went on (more than
#: one where late uploads passed) with `up_bytes`; `down_bytes` are those of the broadcast to it. `seconds` are the
#: node's own, and `path_seconds` those from the broadcast to its message, along the slowest of its children.
_ROW = np.dtype(
    [
        *((name, np.int32) for name in ("task", "round", "level", "node", "received", "sent")),
        *((name, np.int64) for name in ("up_bytes", "down_bytes")),
        *((name, np.float64) for name in ("seconds", "path_seconds")),
    ]
)
_ROWS = GROWING + "nodes"


@dataclass(frozen=True)
class Arrival:
    """A message that arrives at the server, or at a node.

    Attributes:
        client: the first client whose upload is in it.
        sender: the sender's name, for errors.
        upload: as it travels.
        announced: samples of all clients that are in it.
        clients: the number of these clients.
    """

    client: int
    sender: str
    upload: Message
    announced: SampleCounts
    clients: int


#: Decodes and checks a message sent to a node; raises `BadUpload`.
Admit = Callable[[Arrival], Message]


@dataclass
class _Node:
    """A node in one round.

    Attributes:
        level, number: from 1, from 0.
        waiting: how many of its children have not ended the round.
        watch: measures its own work.
        slowest: path seconds of the slowest child so far.
        uploads: its children's uploads, admitted.
        announced, client, clients: those of these uploads; see `Arrival`.
    """

    level: int
    number: int
    watch: Stopwatch
    waiting: int = 0
    slowest: float = 0.0
    uploads: list[Message] = field(default_factory=list)
    announced: SampleCounts = field(default_factory=lambda: SampleCounts(0, 0))
    client: int = -1
    clients: int = 0
    received: int = 0
    sent: int = 0
    up_bytes: int = 0
    down_bytes: int = 0

    def take(self, read: Message, client: int, announced: SampleCounts, clients: int) -> None:
        """Add one more admitted upload."""
        self.received += 1
        self.client = client if self.client < 0 else self.client
        self.uploads.append(read)
        self.announced = SampleCounts(self.announced.task + announced.task, self.announced.run + announced.run)
        self.clients += clients


def level_sizes(clients: int, fan_in: int) -> list[int]:
    """How many nodes each level has, from the clients up; none where the server has no more than `fan_in` clients."""
    sizes = []
    while clients > fan_in:
        clients = -(-clients // fan_in)
        sizes.append(clients)
    return sizes


class Tree:
    """The nodes between K clients and the server.

    Args:
        clients: K.
        fan_in: f, at least 2.
        combination: of the method.
        middleware: what nodes' messages pass through on their way out: a client's codec.
        device: for stopwatches.
    """

    def __init__(
        self, clients: int, fan_in: int, combination: Combination, middleware: Middleware, device: torch.device
    ) -> None:
        self.clients, self.fan_in = clients, fan_in
        self.sizes = level_sizes(clients, fan_in)
        self._combination, self._middleware, self._device = combination, middleware, device
        self._kept = Kept()
        self._rows = Rows(_ROW)
        #: The current round's nodes by level and number; and the longest path to the server so far.
        self._round: dict[tuple[int, int], _Node] = {}
        self._slowest = 0.0
        #: Of all rounds so far.
        self._path_seconds = 0.0

    def climbed(
        self,
        answers: Iterator[Reply | Lost | Late],
        present: Sequence[int],
        broadcast: Message,
        admit: Admit,
        absorb: Callable[[Arrival], None],
    ) -> Iterator[Reply | Lost | Late]:
        """Yields a round's answers; after each has been handled, nodes that it completes send their message on.

        Args:
            answers: a transport's answers; uploads of earlier rounds among them pass the nodes unchanged.
            present: the clients that the round asks.
            broadcast: the round's broadcast.
            admit: decodes and checks what nodes are sent.
            absorb: called with what arrives at the server.
        """
        self._begin(present)
        for answer in answers:
            reply = answer.reply if isinstance(answer, Late) else answer
            client, seconds = reply.client, 0.0  # nobody waits for those that are late or lost
            if isinstance(answer, Reply):
                seconds = answer.seconds
                if (answer.upload.task, answer.upload.round) != (broadcast.task, broadcast.round):
                    self._relayed(client, answer.upload)
                    yield answer
                    continue
            yield answer
            del answer, reply
            if (arrival := self._ended(client, seconds, admit)) is not None:
                absorb(arrival)

    def _begin(self, present: Sequence[int]) -> None:
        """Begin a round that asks these clients."""
        self._round, self._slowest = {}, 0.0
        children = [(0, client) for client in dict.fromkeys(present)]
        for level in range(1, 1 + len(self.sizes)):
            parents: dict[int, _Node] = {}
            for _, number in children:
                parent = number // self.fan_in
                node = parents.setdefault(parent, _Node(level, parent, Stopwatch(self._device)))
                node.waiting += 1
            self._round |= {(level, number): node for number, node in parents.items()}
            children = [(level, number) for number in parents]

    def watch(self, client: int, server: Stopwatch) -> Stopwatch:
        """The stopwatch of the node that takes in the client's upload; the server's if the server takes it in."""
        node = self._round.get((1, client // self.fan_in))
        return server if node is None else node.watch

    def take(self, client: int, read: Message, announced: SampleCounts) -> bool:
        """Give a client's admitted upload to its node; False if there is no node between the client and the server."""
        node = self._round.get((1, client // self.fan_in))
        if node is None:
            return False
        node.take(read, client, announced, 1)
        return True

    def _ended(self, client: int, seconds: float, admit: Admit) -> Arrival | None:
        """End a client's part in the round; returns what then arrives at the server.

        Args:
            client: the client, whether or not its upload arrived.
            seconds: the client's own seconds; 0 if nobody waits for it.
            admit: decodes and checks what nodes are sent.
        """
        path, number = seconds, client
        arrival: Arrival | None = None
        for level in range(1, 1 + len(self.sizes)):
            number //= self.fan_in
            node = self._round[level, number]
            if arrival is not None:
                with node.watch.running():
                    node.take(admit(arrival), arrival.client, arrival.announced, arrival.clients)
            node.waiting -= 1
            node.slowest = max(node.slowest, path)
            if node.waiting:
                return None
            arrival = self._combined(node)
            path = node.slowest + node.watch.seconds
        self._slowest = max(self._slowest, path)
        return arrival

    def _combined(self, node: _Node) -> Arrival | None:
        """The message that a node sends on for its round; None: it received nothing."""
        if not node.uploads:
            return None
        with node.watch.running():
            uploads, node.uploads = node.uploads, []
            whole = uploads[0] if len(uploads) == 1 else self._combination(uploads)
            whole = self._middleware.send(whole, None)
        node.sent += 1
        node.up_bytes += whole.nbytes
        sender = f"node {node.number} of level {node.level}"
        return Arrival(node.client, sender, whole, node.announced, node.clients)

    def received(self, client: int, broadcast: Message) -> None:
        """Count the broadcast to a client and to all nodes above it, once per node."""
        number = client
        for level in range(1, 1 + len(self.sizes)):
            number //= self.fan_in
            node = self._round[level, number]
            if not node.down_bytes:
                node.down_bytes = self._kept.send(self._key(level, number), broadcast)

    def _relayed(self, client: int, upload: Message) -> None:
        """Count a late upload of an earlier round, which goes up unchanged since it cannot be combined with others."""
        number = client
        for level in range(1, 1 + len(self.sizes)):
            number //= self.fan_in
            node = self._round.setdefault((level, number), _Node(level, number, Stopwatch(self._device)))
            node.received, node.sent = node.received + 1, node.sent + 1
            node.up_bytes += upload.nbytes

    def _key(self, level: int, number: int) -> int:
        """A number that is unique among the nodes of all levels."""
        return sum(self.sizes[: level - 1]) + number

    def finish(self, task: int, round_: int) -> None:
        """End the round."""
        rows = [
            (
                *(task, round_, level, number, node.received, node.sent, node.up_bytes, node.down_bytes),
                *(node.watch.seconds, node.slowest + node.watch.seconds),
            )
            for (level, number), node in sorted(self._round.items())
        ]
        self._rows.extend(np.array(rows, dtype=_ROW))
        self._path_seconds += self._slowest
        self._round = {}

    def cells(self) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
        """Header and rows of nodes.csv."""
        return list(_ROW.names or ()), iter(self._rows.array.tolist())

    def report(self) -> TreeReport:
        """The traffic on the links above the nodes, by level, and the rounds' time along their slowest path."""
        rows = self._rows.array
        levels: list[TreeLevel] = []
        for level, size in enumerate(self.sizes, start=1):
            own = rows[rows["level"] == level]
            levels.append(
                {
                    "level": level,
                    "nodes": size,
                    "messages": int(own["sent"].sum()),
                    "up_bytes": int(own["up_bytes"].sum()),
                    "down_bytes": int(own["down_bytes"].sum()),
                    "seconds": float(own["seconds"].sum()),
                }
            )
        return {"fan_in": self.fan_in, "levels": levels, "path_seconds": self._path_seconds}

    def state(self) -> dict[str, Any]:
        """The state outside the rows, as JSON."""
        return {"path_seconds": self._path_seconds, **self._kept.state()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The rows, as a tensor that only grows."""
        return {_ROWS: self._rows.tensor()}

    def restore(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Take over what `state` and `tensors` returned."""
        self._path_seconds = state["path_seconds"]
        self._kept.restore(state)
        self._rows.restore(tensors[_ROWS])
