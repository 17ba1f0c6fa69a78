"""Aggregators between the clients and the server: each combines its children's uploads into one and sends that on.

With a fan-in f, client k sends to node k // f of level 1, node j of a level to node j // f of the next, and the nodes
of the last level, f at most, to the server. A node does to its children's uploads what the server would do before it
absorbs them (decode, check), combines them as the method says (`protocol.combining`) and encodes the result as a client
does. A single upload is passed on, not combined. The server absorbs what comes from the last level; with no more than f
clients there is no node, and it absorbs their own uploads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from fcl_bench.config import knob
from fcl_bench.engine.checkpoint import GROWING
from fcl_bench.engine.codec import Codec
from fcl_bench.engine.exchange import Arrival, Round, Step, Stopwatch, Table, Turn
from fcl_bench.engine.in_process import Here
from fcl_bench.engine.ledger import BroadcastCache, Rows
from fcl_bench.engine.reports import TreeLevel, TreeReport
from fcl_bench.engine.transport import Connection, TransportChoice
from fcl_bench.engine.validation import Validation
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.fields import SampleCounts, Uploads
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Method

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


@dataclass
class _Node:
    """A node in one round.

    Attributes:
        level, number: from 1, from 0.
        waiting: how many of its children have not ended the round.
        slowest: path seconds of the slowest child so far.
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

    def take(self, read: Message, arrival: Arrival) -> None:
        """Add one more upload, which has been validated."""
        self.received += 1
        self.client = arrival.client if self.client < 0 else self.client
        self.uploads.append(read)
        own, more = self.announced, arrival.announced
        assert more is not None
        self.announced = SampleCounts(own.task + more.task, own.run + more.run)
        self.clients += arrival.clients


def level_sizes(clients: int, fan_in: int) -> list[int]:
    """How many nodes each level has, from the clients up; none where the server has no more than `fan_in` clients."""
    sizes = []
    while clients > fan_in:
        clients = -(-clients // fan_in)
        sizes.append(clients)
    return sizes


class Tree(Step):
    """The nodes between K clients and the server.

    Args:
        clients: K.
        fan_in: f, at least 2.
        validation: what nodes do to what they are sent, as the server would.

    Raises:
        ValueError: the method's uploads cannot be combined.
    """

    def __init__(self, clients: int, fan_in: int, method: Method, context: Context, validation: Validation) -> None:
        combination = method.combination(context)
        if combination is None:
            raise ValueError(f"{method.name} has uploads that cannot be combined")
        self.clients, self.fan_in = clients, fan_in
        self.sizes = level_sizes(clients, fan_in)
        self._combination, self._device, self._validation = combination, context.device, validation
        self._middleware = Codec(Uploads.of(method, context), context.wire)
        self._cached = BroadcastCache()
        self._rows = Rows(_ROW)
        #: The current round's nodes by level and number; and the longest path to the server so far.
        self._round: dict[tuple[int, int], _Node] = {}
        self._slowest = 0.0
        #: Of all rounds so far.
        self._path_seconds = 0.0

    def passed(self, round_: Round, turns: Iterator[Turn]) -> Iterator[Turn]:
        self._begin(round_)
        for turn in turns:
            self._take(round_, turn)
            yield turn
            del turn
        self._finish(round_)

    def _begin(self, round_: Round) -> None:
        """Place the nodes of a round."""
        self._round, self._slowest = {}, 0.0
        children = [(0, client) for client in dict.fromkeys(round_.present)]
        for level in range(1, 1 + len(self.sizes)):
            parents: dict[int, _Node] = {}
            for _, number in children:
                parent = number // self.fan_in
                node = parents.setdefault(parent, _Node(level, parent, Stopwatch(self._device)))
                node.waiting += 1
            self._round |= {(level, number): node for number, node in parents.items()}
            children = [(level, number) for number in parents]

    def _take(self, round_: Round, turn: Turn) -> None:
        """Give an upload to its node. The turn then brings what the nodes that it completes send to the server."""
        if turn.earlier is not None:
            self._relayed(turn.client, turn.earlier)
            return
        if turn.reply is not None:
            self._received(turn.client, round_.broadcast)
        seconds = 0.0  # nobody waits for those that are late or lost
        node = self._round.get((1, turn.client // self.fan_in))
        if turn.arrival is not None and turn.reply is not None:
            seconds = turn.reply.seconds
            if node is not None:
                with node.watch.running():
                    read = self._validation.received(round_, turn)
                if read is not None:  # it is not refused
                    node.take(read, turn.arrival)
        arrival = self._ended(turn.client, seconds, round_)
        turn.arrival = arrival if node is not None else turn.arrival

    def _ended(self, client: int, seconds: float, round_: Round) -> Arrival | None:
        """End a client's part in the round, whether or not its upload arrived; returns what then arrives at the server.

        Args:
            seconds: the client's own seconds; 0 if nobody waits for it.
        """
        path = seconds
        arrival: Arrival | None = None
        for place in self._above(client):
            node = self._round[place]
            if arrival is not None:
                with node.watch.running():
                    read = self._validation.read(arrival, round_.schema)
                    assert read is not None  # of a node, whose upload is not left out
                    node.take(read, arrival)
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
        return Arrival(node.client, whole, node.announced, node.clients, sender)

    def _received(self, client: int, broadcast: Message) -> None:
        """Count the broadcast to a client and to all nodes above it, once per node."""
        for level, number in self._above(client):
            node = self._round[level, number]
            if not node.down_bytes:
                # A number that is unique among the nodes of all levels.
                node.down_bytes = self._cached.send(sum(self.sizes[: level - 1]) + number, broadcast)

    def _relayed(self, client: int, upload: Message) -> None:
        """Count a late upload of an earlier round, which goes up unchanged since it cannot be combined with others."""
        for level, number in self._above(client):
            node = self._round.setdefault((level, number), _Node(level, number, Stopwatch(self._device)))
            node.received, node.sent = node.received + 1, node.sent + 1
            node.up_bytes += upload.nbytes

    def _above(self, client: int) -> Iterator[tuple[int, int]]:
        """Level and number of each node between a client and the server, from the client up."""
        return ((level, client // self.fan_in**level) for level in range(1, 1 + len(self.sizes)))

    def _finish(self, round_: Round) -> None:
        """Enter what the round's nodes did."""
        rows = [
            (
                *(round_.task.index, round_.number, level, number),
                *(node.received, node.sent, node.up_bytes, node.down_bytes),
                *(node.watch.seconds, node.slowest + node.watch.seconds),
            )
            for (level, number), node in sorted(self._round.items())
        ]
        self._rows.extend(np.array(rows, dtype=_ROW))
        self._path_seconds += self._slowest
        self._round = {}

    def tables(self) -> Mapping[str, Table]:
        """nodes.csv: a row for each node and round."""
        return {"nodes.csv": (list(_ROW.names or ()), self._rows.array.tolist())}

    def report(self) -> Mapping[str, Any]:
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
        report: TreeReport = {"fan_in": self.fan_in, "levels": levels, "path_seconds": self._path_seconds}
        return report

    def save(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return {"tree": {"path_seconds": self._path_seconds, **self._cached.state()}}, {_ROWS: self._rows.tensor()}

    def restore(self, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self._path_seconds = saved["tree"]["path_seconds"]
        self._cached.restore(saved["tree"])
        self._rows.restore(tensors[_ROWS])


@dataclass
class ThroughTree(TransportChoice):
    """All clients in the server's process, and nodes between them and the server (see `options.tree.tree`).

    Sums in another order give other bits, and merged sketches other numbers, so the tree is part of a run's id.
    """

    name: ClassVar[str] = "tree"
    sees_everything: ClassVar[bool] = True

    fan_in: int = knob(16, least=2)  # type: ignore[misc]

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        yield Here()
