"""The transport over Flower: requests turns of nodes, again where one has been lost; its replies come in order."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fcl_bench.engine.blob import LONGEST_HEADER, BadMessage, fits, together
from fcl_bench.engine.checkpoint import as_state, tag_of, tensor_text, text_tensor
from fcl_bench.engine.codec import RawSamples
from fcl_bench.engine.exchange import Late, Lost, Reply
from fcl_bench.engine.remote.replies import Received, deserialise, deserialise_reply, serialise
from fcl_bench.errors import UserError
from fcl_bench.files import json_hash
from fcl_bench.flower.frames import REFUSED
from fcl_bench.flower.node_registry import NodeInfo, NodeRegistry
from fcl_bench.flower.refusals import INSIDE, SENTENCES
from fcl_bench.flower.relay import Answer, Relay, SuperLinkLost
from fcl_bench.flower.worker import Turn, save_name
from fcl_bench.options.withdrawal import WITHDRAWAL, receipt
from fcl_bench.protocol.message import Message
from fcl_bench.tracking.console import Notices

log = logging.getLogger(__name__)

#: Seconds between looks for answers, and for other nodes.
_LOOK, _LOOK_FOR_NODES = 0.2, 2.0
#: Seconds after which a node that owes an answer is asked who it is: it works on one request at a time, so that its
#: answer says that the earlier request is lost. This question may be lost, too: it is asked again after twice as long.
_SLOW = 30.0
#: Seconds within which a node says who it is, its data loaded; and that a run's end waits for nodes to delete states.
_INFO, _DELETE = 300.0, 15.0
#: Seconds after which a node that could not say who it is is asked again.
_AGAIN = 10.0
#: Names in a checkpoint: where clients' states are, in place of them; and of each client's save.
_NODES, _SAVES = "nodes", "saves"


@dataclass
class _Round:
    """The open part of a round, or of what clients' middlewares are asked in it.

    Attributes:
        request: what is sent for some of the clients, given the seconds after which nobody waits for their answers.
        waiting: clients whose reply may still come.
        until: when the waiting ends.
        task_of: of each client the task of its next turn; only turns of one task go into one request.
        replies: replies that are not handed on yet.
        reasons: what went wrong last, by client.
    """

    request: Callable[[list[int], float], bytes]
    waiting: set[int]
    until: float
    task_of: Callable[[int], int] = field(default=lambda client: 0)
    replies: dict[int, Reply] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Request:
    """A request without an answer, of at most so many bytes: who a node is (no clients), or turns of these clients."""

    node: str
    clients: frozenset[int]
    since: float
    most: int


class FlowerTransport:
    """Clients on nodes of a Flower federation.

    A lost turn is requested again as soon as a node says that it has the client, until the round's deadline. A client's
    state is saved under the name of its turn, so a turn done twice counts as one turn. The seconds in which the server
    absorbs a reply do not count against the deadline.

    Args:
        relay: to the SuperLink, open.
        run: what a node needs to take part, as JSON.
        registry: that no node has entered yet.
        deadline: seconds that a round waits for its replies.
    """

    everything = None
    complete, strangers = False, True

    def __init__(self, relay: Relay, run: dict[str, Any], registry: NodeRegistry, deadline: float) -> None:
        self._relay, self._run, self._registry, self._deadline = relay, run, registry, deadline
        self.clients, self.most = registry.samples.shape[1], 0
        self._requests: dict[str, _Request] = {}
        #: The save of each client's state: now, when the server's last checkpoint was saved, and, of those whose
        #: uploads of the round may still be refused, before it.
        self._saves: dict[int, str] = {}
        self._checkpoint: dict[int, str] = {}
        self._before: dict[int, str | None] = {}
        self._have_saved = False
        #: What it takes to take clients out of the run (`execution.withdrawing`); None: nobody can be. And the receipt
        #: of each client's last upload.
        self.withdrawal: dict[str, Any] | None = None
        self._receipts: dict[int, str] = {}
        self._looked = -math.inf
        #: Nodes that could not say who they are, and when they are asked again.
        self._again: dict[str, float] = {}
        self._notices = Notices(log)

    @property
    def data(self) -> str:
        """A hash of the nodes' hashes of their data, in the order of the clients."""
        return json_hash([self._registry.data[client] for client in range(self.clients)])

    @property
    def raw(self) -> RawSamples:
        return self._registry.infos[0].raw

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        there = np.ones(self.clients, dtype=np.int64)
        there[[entry["client"] for entry in self.withdrawal["withdrawn"]] if self.withdrawal else []] = 0
        return there * self._registry.samples[task], there * self._registry.labelled[task]

    def open(self) -> list[NodeInfo]:
        """Wait until every client has a node; what the nodes say of themselves.

        Raises:
            UserError: a client has none within the deadline, or a node does not fit the run.
        """
        until = time.monotonic() + self._deadline
        while missing := self._registry.unassigned():
            if time.monotonic() > until:
                raise UserError(
                    f"client {missing[0]} has no node after {self._deadline:g} seconds"
                    f" ({len(missing)} of {self.clients} clients have none)",
                    f"fcl-bench-node clients={missing[0]} where its data are, or a longer transport.deadline",
                )
            self._unless_lost(self._look, until)
            time.sleep(_LOOK)
        return self._registry.infos

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Reply | Lost | Late]:
        self._before = {}
        for answer in self._answers(present, partial(self._turns, broadcast)):
            if isinstance(answer, Reply):
                answer = self._noted(answer, broadcast)
            yield answer

    def _turns(self, broadcast: Message, clients: list[int], seconds: float) -> bytes:
        """The request for these clients' turns."""
        turns = [Turn(client, self._saves.get(client), self._checkpoint.get(client)) for client in clients]
        return serialise("turn", broadcast, run=self._run, seconds=seconds, turns=turns)

    def _noted(self, answer: Reply, broadcast: Message) -> Reply:
        """The reply, of which this transport keeps the client's save and the upload's receipt."""
        self._before[answer.client] = self._saves.pop(answer.client, None)
        if answer.stored:
            self._saves[answer.client], self._have_saved = save_name(broadcast), True
        if self.withdrawal:
            self._receipts[answer.client] = receipt(answer.client, answer.upload)[0]
            self.withdrawal["absorbed"][self._receipts[answer.client]] = answer.client, broadcast.task
        return self._numbered(answer) if "classes" in self._run else answer

    def arrivals(self, pending: Iterable[tuple[int, int]], broadcast: Callable[[int], Message]) -> Iterator[Reply]:
        """The replies as they come; each client is asked for its next task as soon as its last reply is there."""
        left: dict[int, list[int]] = {}
        for client, task in sorted(pending):
            left.setdefault(client, []).append(task)

        def turns(clients: list[int], seconds: float) -> bytes:
            return self._turns(broadcast(left[clients[0]][0]), clients, seconds)

        current = _Round(turns, set(left), time.monotonic() + self._deadline, lambda client: left[client][0])
        self._requests = {name: other for name, other in self._requests.items() if not other.clients}
        while left:
            self._unless_lost(lambda: self._progress(current), current.until)
            if not current.replies:
                late = time.monotonic() > current.until
                for client in left:
                    if late or client not in current.waiting:
                        reason = current.reasons.get(client, f"nobody has answered for {self._deadline:g} seconds")
                        what = f"client {client} was lost before its upload of task {left[client][0]}: {reason}"
                        raise UserError(what, "the same command goes on from the last checkpoint")
                time.sleep(_LOOK)
            for client, reply in [*current.replies.items()]:
                del current.replies[client]
                if (reply.upload.task, reply.upload.round) != (left[client].pop(0), 0):
                    raise BadMessage(f"the node of client {client} answers for another task than it was asked for")
                yield self._noted(reply, broadcast(reply.upload.task))
                if left[client]:
                    current.waiting.add(client)
                else:
                    del left[client]
                current.until = time.monotonic() + self._deadline

    def ask(self, requests: Mapping[int, Message]) -> Iterator[Reply | Lost]:
        def questions(clients: list[int], seconds: float) -> bytes:
            own = {client: requests[client] for client in clients}
            return serialise("ask", together(own), run=self._run, seconds=seconds)

        return self._answers([*requests], questions)

    def _answers(self, present: Sequence[int], request: Callable[[list[int], float], bytes]) -> Iterator[Reply | Lost]:
        """Of each client of `present` its reply, in this order, or that it is lost."""
        current = _Round(request, set(present), time.monotonic() + self._deadline)
        self._requests = {name: other for name, other in self._requests.items() if not other.clients}
        for client in present:
            while client in current.waiting and time.monotonic() < current.until:
                self._unless_lost(lambda: self._progress(current), current.until)
                if client in current.waiting:
                    time.sleep(_LOOK)
            if client in current.waiting:
                with contextlib.suppress(SuperLinkLost):  # the next round opens another relay
                    self._look(current)  # of what came since the last one
            begin = time.monotonic()
            if client not in current.replies:
                yield Lost(client, current.reasons.get(client, f"no answer within {self._deadline:g} seconds"))
            else:
                yield current.replies.pop(client)
            # The server has absorbed it, in which time nobody looked for answers.
            current.until += time.monotonic() - begin

    def _numbered(self, reply: Reply) -> Reply:
        """The reply of a site, which counts its samples from 0, with numbers that no other client's samples have."""
        before = int(self._registry.samples[:, : reply.client].sum())
        alone = reply.revealed
        return replace(reply, revealed=alone and replace(alone, samples=alone.samples + before))

    def _unless_lost(self, step: Callable[[], None], until: float) -> None:
        """Do a step; if the SuperLink is lost, open another relay instead, as soon as that is possible."""
        try:
            return step()
        except SuperLinkLost as lost:
            reason = lost
        log.warning("%s; trying again until the deadline", reason)
        self._requests, self._looked = {}, -math.inf
        self._registry.clear()
        while time.monotonic() < until:
            try:
                return self._relay.open()
            except SuperLinkLost as lost:
                reason = lost
            time.sleep(1.0)
        raise UserError(str(reason), "the same command goes on from the last checkpoint once the SuperLink is there")

    def _progress(self, current: _Round) -> None:
        """Send the requests that are due, and take the answers that have arrived."""
        requested = frozenset[int]().union(*(request.clients for request in self._requests.values()))
        for node, clients in self._registry.by_node(sorted(current.waiting - requested)).items():
            first = min(map(current.task_of, clients))
            clients = [client for client in clients if current.task_of(client) == first]
            left = max(1.0, current.until - time.monotonic())
            self._push(node, left, current.request(clients, left), frozenset(clients))
        self._look(current)

    def _push(self, node: str, seconds: float, request: bytes, clients: frozenset[int] = frozenset()) -> None:
        name = self._relay.push(node, seconds, request)
        if name is None:
            self._registry.remove(node)
        else:
            self._requests[name] = _Request(node, clients, time.monotonic(), LONGEST_HEADER + len(clients) * self.most)

    def _look(self, current: _Round | None = None) -> None:
        """Take the answers that are there; ask nodes that are new, and those that are slow, who they are."""
        for answer in self._relay.pull({name: request.most for name, request in self._requests.items()}):
            request = self._requests.pop(answer.message, None)
            if request is None:
                continue
            if not request.clients:
                self._take_info(answer, request)
            elif current is not None:
                self._take_turns(answer, request, current)
        now = time.monotonic()
        if now - self._looked < _LOOK_FOR_NODES:
            return
        self._looked = now
        requests = self._requests.values()
        asked: dict[str, list[float]] = {}
        for request in requests:
            if not request.clients:
                asked.setdefault(request.node, []).append(now - request.since)
        slow = {request.node for request in requests if request.clients and now - request.since > _SLOW}
        for node in self._relay.nodes():
            new = node not in self._registry and now >= self._again.get(node, now)
            ages = asked.get(node, [math.inf])
            if (new or node in slow) and min(ages) > _SLOW * 2 ** (len(ages) - 1):
                self._push(node, _INFO, serialise("info", run=self._run))

    def _take_info(self, answer: Answer, request: _Request) -> None:
        problem = answer.error or ("" if answer.blobs else "it says nothing")
        try:
            if not problem:
                received = deserialise(answer.blobs[0])
                if received.kind == "failed":
                    raise UserError(_failure(received), "the log of the site, which says why")
                info = NodeInfo.read(received.beside)
                self._registry.register(request.node, info)
        except UserError as error:
            if self._registry.unassigned():
                raise
            problem = str(error)
        if problem:
            self._registry.remove(request.node)
            self._again[request.node] = time.monotonic() + _AGAIN
            # If all clients have a node, this one was killed and is still counted as there, or it is one too many.
            level = logging.WARNING if answer.blobs or self._registry.unassigned() else logging.DEBUG
            self._notices.tell(f"info {level} {problem}", f"a node is left out: {problem}", level)
            return
        # Earlier requests to this node, or to these clients on a node that they have left, are lost. If an answer is
        # only delayed, the turn is done twice.
        self._requests = {
            name: other
            for name, other in self._requests.items()
            if other.since >= request.since or (other.node != request.node and other.clients.isdisjoint(info.clients))
        }

    def _take_turns(self, answer: Answer, request: _Request, current: _Round) -> None:
        if answer.error:
            # The node or its worker is gone: it is asked again once it has said which clients it has.
            self._registry.remove(request.node)
            current.reasons |= dict.fromkeys(request.clients, answer.error)
            if answer.error.startswith(REFUSED):  # what this node sends no server takes, however often it is asked
                current.waiting -= request.clients
            return
        for blob in answer.blobs:
            try:
                received = deserialise(blob)
                if received.kind == "failed":
                    # What a node refuses now it refuses however often it is asked.
                    reason = _failure(received)
                    lost = current.waiting & request.clients & set(received.beside["clients"])
                    current.waiting -= lost
                    current.reasons |= dict.fromkeys(lost, reason)
                    continue
                reply = deserialise_reply(received)
            except BadMessage as bad:
                clients = ", ".join(map(str, sorted(request.clients)))
                raise UserError(f"the node of clients {clients}: {bad.what}", bad.remedy) from bad
            if reply.client in current.waiting & request.clients:
                current.waiting.discard(reply.client)
                current.replies[reply.client] = reply

    def refused(self, client: int) -> None:
        before = self._before.pop(client)
        self._saves.pop(client, None)
        if before is not None:
            self._saves[client] = before
        if self.withdrawal:
            del self.withdrawal["absorbed"][self._receipts[client]]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The save of each client's state, and receipts; empty if there is neither."""
        self._checkpoint = dict(self._saves)
        saves = {**as_state(_NODES), _SAVES: text_tensor(json.dumps(self._saves))}
        if self.withdrawal:
            return {**saves, WITHDRAWAL: text_tensor(json.dumps({**self.withdrawal, "sites": self.data}))}
        return saves if self._saves else {}

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        if states and tag_of(states) != _NODES:
            raise UserError("what the clients stored was saved over another transport", "the same transport as before")
        if (WITHDRAWAL in states) != bool(self.withdrawal):
            raise UserError("transport.withdrawal is not what it was when the run began", "that, or force=true")
        self.withdrawal = json.loads(tensor_text(states[WITHDRAWAL])) if self.withdrawal else None
        saves = json.loads(tensor_text(states[_SAVES])) if states else {}
        self._saves = {int(client): save for client, save in saves.items()}
        self._checkpoint, self._have_saved = dict(self._saves), bool(saves)

    def delete_states(self) -> None:
        """Have the nodes delete the clients' states of the complete run. A node that does not answer still has them."""
        if not self._have_saved:
            return
        self._requests = {}
        try:
            for node in self._registry.nodes:
                self._push(node, _DELETE, serialise("delete", run=self._run), frozenset({-1}))
            until = time.monotonic() + _DELETE
            while self._requests and time.monotonic() < until:
                for answer in self._relay.pull(dict.fromkeys(self._requests, LONGEST_HEADER)):
                    self._requests.pop(answer.message, None)
                time.sleep(_LOOK)
        except SuperLinkLost as lost:
            log.warning("the nodes could not be told that the run is complete: %s", lost)


def _failure(answer: Received) -> str:
    """What a node's number says, in one line."""
    if not fits(answer.beside, {"clients": list[int], "code": int}):
        raise BadMessage("a node does not say whose turn has failed")
    clients, code = answer.beside["clients"], answer.beside["code"]
    return f"the node of client {', '.join(map(str, clients))}: error {code}: {SENTENCES.get(code, SENTENCES[INSIDE])}"
