"""The transport over Flower: asks nodes for turns, again where one has been lost, and returns replies in order."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fcl_bench.engine.client_state import as_state, tag_of
from fcl_bench.engine.exchange import Late, Lost, Reply
from fcl_bench.engine.raw_cost import RawSamples
from fcl_bench.engine.remote.replies import deserialise, reply_heard, serialise
from fcl_bench.errors import UserError
from fcl_bench.flower.line import Answer, Line, LinkLost
from fcl_bench.flower.node_registry import NodeInfo, NodeRegistry
from fcl_bench.flower.turns import Asked, Tag, tags_of, tags_tensor
from fcl_bench.protocol.message import Message
from fcl_bench.tracking.console import Notices

log = logging.getLogger(__name__)

#: Seconds between looks for answers, and for other nodes.
_LOOK, _LOOK_FOR_NODES = 0.2, 2.0
#: Seconds after which a node that owes an answer is asked for a census: it works on one request at a time, so that its
#: answer says that the earlier request is lost.
_SLOW = 30.0
#: Seconds within which a node answers a census, its data loaded; and that a run's end waits for nodes to forget it.
_CENSUS, _FORGET = 300.0, 15.0
#: Seconds after which a node that could not give a census is asked for one again.
_AGAIN = 10.0
#: Names of a checkpoint's tensors: where clients' states are, in place of them.
_TAGS, _NODES = "tags", "nodes"


@dataclass
class _Round:
    """The open part of a round.

    Attributes:
        broadcast: the round's broadcast.
        waiting: clients without a reply.
        until: when the waiting ends.
        replies: replies that are not handed on yet.
        reasons: what went wrong last, by client.
    """

    broadcast: Message
    waiting: set[int]
    until: float
    replies: dict[int, Reply] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Asked:
    """A request without an answer: for a census (no clients), or for turns of these clients."""

    node: str
    clients: frozenset[int]
    since: float


class Flower:
    """Clients on nodes of a Flower federation.

    A lost turn is requested again as soon as a node reports that the client lives there, until the round's deadline. A
    client's state is stored under the number of its turn, so a turn done twice counts as one turn. The seconds in which
    the server absorbs a reply do not count against the deadline.

    Args:
        line: to the SuperLink, open.
        run: what a node needs to take part, as JSON.
        homes: that nobody has entered yet.
        deadline: seconds that a round waits for its replies.
        apart: whether each client counts its samples from 0, rather than as the whole data set does.
    """

    everything = None
    complete = False

    def __init__(
        self, line: Line, run: dict[str, Any], homes: NodeRegistry, deadline: float, apart: bool = False
    ) -> None:
        self._line, self._run, self._homes, self._deadline, self._apart = line, run, homes, deadline, apart
        self.clients = homes.samples.shape[1]
        self._asked: dict[str, _Asked] = {}
        #: After which turn each client kept what it keeps: now, when the server's last checkpoint was saved, and, of
        #: those whose uploads of the round may still be refused, before it.
        self._tags: dict[int, Tag] = {}
        self._safe: dict[int, Tag] = {}
        self._before: dict[int, Tag | None] = {}
        self._keeps = False
        self._looked = -math.inf
        #: Nodes that could give no census, and when they are asked again.
        self._again: dict[str, float] = {}
        self._notices = Notices(log)

    @property
    def data(self) -> list[str]:
        """Return, per client, the hash of its node's data."""
        return [self._homes.data[client] for client in range(self.clients)]

    @property
    def raw(self) -> RawSamples | None:
        said_so = [resident.census.raw for resident in self._homes.residents if resident.census.raw is not None]
        return RawSamples(**said_so[0]) if said_so else None

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        return self._homes.samples[task], self._homes.labelled[task]

    def open(self) -> list[NodeInfo]:
        """Wait until every client has a node; return what the nodes say of themselves.

        Raises:
            UserError: a client has none within the deadline, or a node does not fit the run.
        """
        until = time.monotonic() + self._deadline
        while missing := self._homes.homeless():
            if time.monotonic() > until:
                raise UserError(
                    f"client {missing[0]} has no node after {self._deadline:g} seconds"
                    f" ({len(missing)} of {self.clients} clients have none)",
                    f"fcl-bench-node clients={missing[0]} where its data are, or a longer transport.deadline",
                )
            self._unless_lost(self._look, until)
            time.sleep(_LOOK)
        return self._homes.residents

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Reply | Lost | Late]:
        at_hand = _Round(broadcast, set(present), time.monotonic() + self._deadline)
        self._asked = {name: asked for name, asked in self._asked.items() if not asked.clients}
        self._before = {}
        for client in present:
            while client in at_hand.waiting and time.monotonic() < at_hand.until:
                self._unless_lost(lambda: self._progress(at_hand), at_hand.until)
                if client in at_hand.waiting:
                    time.sleep(_LOOK)
            if client in at_hand.waiting:
                with contextlib.suppress(LinkLost):  # a line that is lost is opened again by the next round
                    self._look(at_hand)  # of what came since the last one
            begin = time.monotonic()
            if client in at_hand.waiting:
                yield Lost(client, at_hand.reasons.get(client, f"no answer within {self._deadline:g} seconds"))
                at_hand.until += time.monotonic() - begin
                continue
            reply = at_hand.replies.pop(client)
            self._before[client] = self._tags.pop(client, None)
            if reply.stored:
                self._tags[client], self._keeps = Tag(broadcast.task, broadcast.round), True
            yield self._numbered(reply) if self._apart else reply
            # The server has absorbed it, in which time nobody looked for answers.
            at_hand.until += time.monotonic() - begin

    def _numbered(self, reply: Reply) -> Reply:
        """Return the reply with numbers of samples that no other client's samples have."""
        before = int(self._homes.samples[:, : reply.client].sum())
        return replace(reply, revealed=replace(reply.revealed, samples=reply.revealed.samples + before))

    def _unless_lost(self, step: Callable[[], None], until: float) -> None:
        """Do a step; if the SuperLink is lost, open a new line instead, as soon as that is possible."""
        try:
            return step()
        except LinkLost as lost:
            reason = lost
        log.warning("%s; trying again until the deadline", reason)
        self._asked, self._looked = {}, -math.inf
        self._homes.forget()
        while time.monotonic() < until:
            try:
                return self._line.open()
            except LinkLost as lost:
                reason = lost
            time.sleep(1.0)
        raise UserError(str(reason), "the same command goes on from the last checkpoint once the SuperLink is there")

    def _progress(self, at_hand: _Round) -> None:
        """Send the requests that are due, and take the answers that have arrived."""
        asked = frozenset[int]().union(*(asked.clients for asked in self._asked.values()))
        for node, clients in self._homes.by_node(sorted(at_hand.waiting - asked)).items():
            left = max(1.0, at_hand.until - time.monotonic())
            turns = [Asked(client, self._tags.get(client), self._safe.get(client)).state() for client in clients]
            request = serialise("turn", at_hand.broadcast, run=self._run, seconds=left, turns=turns)
            self._push(node, left, request, frozenset(clients))
        self._look(at_hand)

    def _push(self, node: str, seconds: float, request: bytes, clients: frozenset[int] = frozenset()) -> None:
        name = self._line.push(node, seconds, request)
        if name is None:
            self._homes.leave(node)
        else:
            self._asked[name] = _Asked(node, clients, time.monotonic())

    def _look(self, at_hand: _Round | None = None) -> None:
        """Take the answers that are there; ask nodes that are new, and those that are slow, who they are."""
        for answer in self._line.pull(list(self._asked)):
            asked = self._asked.pop(answer.message, None)
            if asked is None:
                continue
            if not asked.clients:
                self._take_census(answer, asked)
            elif at_hand is not None:
                self._take_turns(answer, asked, at_hand)
        now = time.monotonic()
        if now - self._looked < _LOOK_FOR_NODES:
            return
        self._looked = now
        counted = {asked.node for asked in self._asked.values() if not asked.clients and now - asked.since < _CENSUS}
        slow = {asked.node for asked in self._asked.values() if asked.clients and now - asked.since > _SLOW}
        for node in self._line.nodes():
            fresh = node not in self._homes and now >= self._again.get(node, now)
            if node not in counted and (fresh or node in slow):
                self._push(node, _CENSUS, serialise("census", run=self._run))

    def _take_census(self, answer: Answer, asked: _Asked) -> None:
        if answer.error:
            self._homes.leave(asked.node)
            self._again[asked.node] = time.monotonic() + _AGAIN
            # If all clients have a node, this one was killed and is still counted as there.
            level = logging.WARNING if self._homes.homeless() else logging.DEBUG
            told = f"a node does not say who lives there: {answer.error}"
            self._notices.tell(f"census {level} {answer.error}", told, level)
            return
        resident = NodeInfo.read(deserialise(answer.blobs[0]).beside)
        self._homes.enter(asked.node, resident)
        # Earlier requests to these clients, here or on a node that they have left, are lost. If an answer is only
        # delayed, the turn is done twice.
        here = set(resident.census.clients)
        self._asked = {
            name: other
            for name, other in self._asked.items()
            if not (other.clients & here and other.since < asked.since)
        }

    def _take_turns(self, answer: Answer, asked: _Asked, at_hand: _Round) -> None:
        if answer.error:
            # The node or its worker is gone: it is asked again once it has reported which clients live there.
            self._homes.leave(asked.node)
            at_hand.reasons |= dict.fromkeys(asked.clients, answer.error)
            return
        for blob in answer.blobs:
            reply = reply_heard(deserialise(blob))
            if reply.client in at_hand.waiting & asked.clients:
                at_hand.waiting.discard(reply.client)
                at_hand.replies[reply.client] = reply

    def refused(self, client: int) -> None:
        before = self._before.pop(client)
        self._tags.pop(client, None)
        if before is not None:
            self._tags[client] = before

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the turn after which each client saved its state; empty if no client has a state."""
        self._safe = dict(self._tags)
        return {**as_state(_NODES), _TAGS: tags_tensor(self._tags, self.clients)} if self._tags else {}

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        if states and tag_of(states) != _NODES:
            raise UserError("what the clients keep was saved over another transport", "the same transport as before")
        self._tags = tags_of(states[_TAGS].tolist()) if states else {}
        self._safe, self._keeps = dict(self._tags), bool(states)

    def forget(self) -> None:
        """Make the nodes forget the clients' states of the complete run. A node that does not answer keeps them."""
        if not self._keeps:
            return
        self._asked = {}
        try:
            for node in self._homes.nodes:
                self._push(node, _FORGET, serialise("forget", run=self._run), frozenset({-1}))
            until = time.monotonic() + _FORGET
            while self._asked and time.monotonic() < until:
                for answer in self._line.pull(list(self._asked)):
                    self._asked.pop(answer.message, None)
                time.sleep(_LOOK)
        except LinkLost as lost:
            log.warning("the nodes could not be told that the run is complete: %s", lost)
