"""The clients of a Flower app as the engine's transport: a message to each node, and its reply under a deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ConfigRecord, MessageType, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fcl_bench.engine.exchange import Lost, Reply
from fcl_bench.engine.validation import MOST_SAMPLES
from fcl_bench.errors import UserError, printable
from fcl_bench.flower.app import records
from fcl_bench.flower.pulls import Pulls
from fcl_bench.protocol.message import Message
from fcl_bench.tracking.console import Notices

log = logging.getLogger(__name__)

#: Seconds between two looks for nodes and answers.
_LOOK = 0.1
REMEDY = "the log of the node says more; transport.minimum=SHARE lets rounds go on without some clients"


class About(NamedTuple):
    """What a node says of its client.

    Attributes:
        client, clients: its number, and of how many.
        inputs: features of a sample; 0: its samples are images.
        samples, labelled: (T,) of each task, and how many of them have a label.
    """

    client: int
    clients: int
    inputs: int
    samples: list[int]
    labelled: list[int]


class NodesTransport:
    """Clients on nodes, each of which is asked once who its client is.

    Args:
        tasks: T.
        minimum: the least share of the clients that has to be there; None: all.
        deadline: seconds for which nodes, and then a round's replies, are waited for.
        seed: of the run, with which the network of the app is built.
        network: hash of the weights that it begins with, or `records.NONE`.
    """

    everything = raw = None
    complete, strangers = False, True

    def __init__(self, grid: Grid, tasks: int, minimum: float | None, deadline: float, seed: int, network: str) -> None:
        self._grid, self._pulls = grid, Pulls(grid)
        self._share, self._deadline = 1.0 if minimum is None else minimum, deadline
        self._seed, self._network = seed, network
        self.clients = self.inputs = self.most = 0
        #: What every turn needs to know of the run (`plan.halves`), as JSON; and the names in replies to a broadcast.
        self.run = ""
        self.answered: Callable[[Message], Collection[str]] = lambda broadcast: ()
        #: The node of each client, as far as there is one; and all nodes that have been asked who they are.
        self._nodes: dict[int, int] = {}
        self._seen: set[int] = set()
        self._held = np.zeros((tasks, 2, 0), dtype=np.int64)
        #: The turn after which each client has what it retains; and, of those of this round, the one before.
        self._saves: dict[int, str] = {}
        self._before: dict[int, str | None] = {}
        self._notices = Notices(log)

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        self.meet()
        samples, labelled = self._held[task]
        return samples, labelled

    def meet(self) -> None:
        """Find the clients' nodes: a node that is new is asked who it is. Raises a `UserError`: too few are there."""
        content = RecordDict({records.CONFIG: ConfigRecord({"seed": self._seed, "tasks": len(self._held)})})
        until, asked, under_way = time.monotonic() + self._deadline, dict[str, int](), bool(self._nodes)
        while True:
            there = set(self._grid.get_node_ids())
            self._nodes = {client: node for client, node in self._nodes.items() if node in there}
            new = sorted(there - self._seen)
            self._seen |= {node for node in new if self._push(asked, node, node, content, MessageType.QUERY, until)}
            for node, answer in self._answers(asked):
                self._register(node, answer)
            missing = [client for client in range(self.clients) if client not in self._nodes]
            enough = 0 < self._share * self.clients <= len(self._nodes)
            # Once the run is under way, clients whose nodes are gone are not waited for.
            if enough and (not missing or (under_way and not there & set(asked.values()))):
                return
            if time.monotonic() > until:
                break
            time.sleep(_LOOK)
        if not enough:
            some = f"{len(missing)} of {self.clients}" if missing else "all"
            where = f"client {(missing or [0])[0]} has no node after {self._deadline:g} seconds"
            raise UserError(f"{where} ({some} clients have none)", REMEDY)

    def _register(self, node: int, answer: FlowerMessage) -> None:
        """Take in what a node says of its client. Raises a `UserError` for a node that the run may not leave out."""
        if not (trouble := _error(answer)):
            try:
                numbers: Any = answer.content.metric_records[records.METRICS]
                about = About(*(numbers[name] for name in About._fields))
                network = answer.content.config_records[records.CONFIG]["network"]
                counts = np.array([about.samples, about.labelled], dtype=np.int64).T
                trouble = self._objection(about, counts, network)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                trouble = f"it does not say who it is ({error})"
        if not trouble:
            self._nodes[about.client] = node
            self._held[:, :, about.client] = counts
        elif self._share == 1:
            raise UserError(f"the node {node}: {trouble}", REMEDY)
        else:
            self._notices.tell(trouble, f"the node {node} is left out: {trouble}")

    def _objection(self, about: About, counts: np.ndarray, network: Any) -> str:
        """What a node says that cannot be, or that others contradict; "": nothing."""
        if not self.clients:
            self.clients, self.inputs = int(about.clients), int(about.inputs)
            self._held = np.zeros((*self._held.shape[:2], self.clients), dtype=np.int64)
        if (about.clients, about.inputs) != (self.clients, self.inputs):
            others = f"{self.clients} clients and {self.inputs} features"
            return f"it speaks of {about.clients} clients and {about.inputs} features, others of {others}"
        sound = counts.shape == self._held.shape[:2] and (counts >= 0).all() and (counts <= MOST_SAMPLES).all()
        if about.client not in range(self.clients) or not sound or (counts[:, 1] > counts[:, 0]).any():
            return f"it says what cannot be: {about}"
        if about.client in self._nodes:
            return f"another node has partition-id={about.client}, too"
        return "" if network == self._network else "its network begins with other weights than the server's"

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Reply | Lost]:
        answered, end = self.answered(broadcast), f"{broadcast.task}.{broadcast.round}"
        settings = {"run": self.run, "end": end}
        until, asked, answers = time.monotonic() + self._deadline, dict[str, int](), dict[int, Reply | Lost]()
        self._before = {}
        for client in present:
            content = records.request(broadcast, answered, {**settings, "begin": self._saves.get(client, records.NONE)})
            node = self._nodes.get(client)
            if node is None or not self._push(asked, client, node, content, MessageType.TRAIN, until):
                answers[client] = Lost(client, "its node is not there")
        for client in present:
            while client not in answers and time.monotonic() < until:
                for sender, answer in self._answers(asked):
                    answers[sender] = self._reply(sender, answer, broadcast)
                if client not in answers:
                    time.sleep(_LOOK)
            begin = time.monotonic()
            found = answers.pop(client, Lost(client, f"no answer within {self._deadline:g} seconds"))
            if isinstance(found, Reply):
                self._before[client] = self._saves.pop(client, None)
                if found.stored:
                    self._saves[client] = end
            yield found
            # The server has absorbed it, in which time nobody looked for answers.
            until += time.monotonic() - begin

    def _push(self, asked: dict[str, int], who: int, node: int, content: RecordDict, kind: str, until: float) -> bool:
        """Send a message to a node; whether Flower took it. `asked` gets the message's name, of `who`."""
        message = FlowerMessage(content, node, kind, ttl=max(1.0, until - time.monotonic()))
        (name,) = list(self._grid.push_messages([message])) or [None]
        asked |= {name: who} if name else {}
        return bool(name)

    def _answers(self, asked: dict[str, int]) -> Iterator[tuple[int, FlowerMessage]]:
        """The answers that are there, and whose they are; they are taken off `asked`."""
        for answer in self._pulls.answers(asked):
            yield asked.pop(answer.metadata.reply_to_message_id), answer

    def _reply(self, client: int, answer: FlowerMessage, broadcast: Message) -> Reply | Lost:
        if trouble := _error(answer):
            return Lost(client, trouble)
        try:
            upload, numbers = records.upload_of(answer.content, broadcast, self.most)
            seconds, stored = max(0.0, float(numbers["seconds"])), int(numbers["stored"])
        except (ValueError, KeyError, TypeError) as error:
            return Lost(client, f"what it sent is no upload: {error}")
        return Reply(client, upload, seconds, None, {"stored": stored} if stored > 0 else {}, 0)

    def ask(self, requests: Mapping[int, Message]) -> Iterator[Reply | Lost]:
        raise TypeError("no middleware of a Flower app asks clients")

    def refused(self, client: int) -> None:
        self._saves.pop(client, None)
        if before := self._before.pop(client):
            self._saves[client] = before

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        raise TypeError("a run of a Flower app is not resumed")


def _error(answer: FlowerMessage) -> str:
    """What Flower says went wrong, in one line; "": nothing."""
    if not answer.has_error():
        return ""
    return printable(f"Flower's error {answer.error.code}: {' '.join(str(answer.error.reason).split())}")
