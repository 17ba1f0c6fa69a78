"""The near end: the server's process reaches clients in other processes through whatever carries bytes."""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from fcl_bench.engine.blob import LONGEST_HEADER, BadMessage, together
from fcl_bench.engine.checkpoint import ELSEWHERE, as_state, new_tag, of_clients
from fcl_bench.engine.codec import RawSamples
from fcl_bench.engine.exchange import Late, Lost, Reply
from fcl_bench.engine.remote.host import Host
from fcl_bench.engine.remote.replies import Received, deserialise, deserialise_reply, serialise, serialise_reply
from fcl_bench.engine.transport import Clients
from fcl_bench.errors import UserError
from fcl_bench.protocol.message import Message

log = logging.getLogger(__name__)

#: Replies of one process that may wait in the server's process for their turn to be absorbed.
AHEAD = 4


class Gone(Exception):
    """A process no longer answers; the message has the reason in a few words."""


class Peer(ABC):
    """Another process: takes requests, and gives its answers in the order in which it made them."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: Bytes of the largest answer that may come; set before what is answered is sent.
        self.most = LONGEST_HEADER

    @abstractmethod
    def send(self, blob: bytes) -> None:
        """Raises `Gone` if nobody is there any more."""

    @abstractmethod
    def receive(self) -> bytes | memoryview:
        """The next answer. Raises `Gone` where none will come."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether `receive` does not have to wait."""

    def request(self, kind: str, message: Message | None = None, **beside: object) -> None:
        """Send a request. Raises a `UserError` if the process is gone: the run cannot continue without it."""
        try:
            self.send(serialise(kind, message, **beside))
        except Gone as error:
            raise lost(self.name, error) from error

    def response(self, kind: str) -> Received:
        """The next answer, which has to be of this kind. Raises as `request` does."""
        try:
            answer = deserialise(self.receive())
        except Gone as error:
            raise lost(self.name, error) from error
        if answer.kind != kind:
            raise BadMessage(f"{self.name} answered {answer.kind}, not {kind}")
        return answer


def lost(process: str, error: Exception) -> UserError:
    """The error with which a run ends that cannot continue without a process."""
    return UserError(f"{process} was lost: {error}", "the same command goes on from the last checkpoint")


class OwnTurns:
    """The turns of this process's clients in a round, in client order; some may be done before they are due.

    Args:
        replies: does a turn when it is asked for the next reply.
    """

    def __init__(self, replies: Iterator[Reply]) -> None:
        self._replies = replies
        self._waiting: deque[bytes] = deque()

    def work_ahead(self) -> bool:
        """Do the next turn now; returns False if there is none, or no room for its reply."""
        if len(self._waiting) == AHEAD or (reply := next(self._replies, None)) is None:
            return False
        # As bytes, like another process's reply: the next turn may use the memory of this one's upload.
        self._waiting.append(serialise_reply(reply))
        return True

    def next(self) -> Reply:
        """The reply that is due."""
        return deserialise_reply(deserialise(self._waiting.popleft())) if self._waiting else next(self._replies)


class Remote:
    """Clients in other processes, and some in this one.

    Answers are taken in client order; each process computes as far ahead as there is room for its answers, this one
    while the answer that is due has not come.

    Args:
        assignment: client -> the number of its process; of clients in this process that of no peer.
    """

    everything = None
    complete = strangers = False

    def __init__(
        self,
        clients: Clients,
        peers: Mapping[int, Peer],
        assignment: Sequence[int],
        local: Host,
    ) -> None:
        self.clients, self.most = clients.count, 0
        self._peers, self._assignment, self._local = peers, list(assignment), local
        self._samples = [clients.samples(task) for task in range(clients.tasks)]
        self._last = (0, 0)
        #: Per process, the clients whose uploads were refused since it was last sent a request.
        self._refused: defaultdict[int, list[int]] = defaultdict(list)

    @property
    def raw(self) -> RawSamples:
        return self._local.node.data.raw

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        return self._samples[task]

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Reply | Lost | Late]:
        self._last = broadcast.task, broadcast.round
        # One request for all: each process finds its own clients in it.
        numbers = self._processes(present)
        refused = [client for number in numbers for client in self._refused.pop(number, [])]
        request = serialise("exchange", broadcast, clients=list(present), refused=refused) if numbers else b""
        gone = self._sent(dict.fromkeys(numbers, request))
        self._local.node.commit()  # at once, though its turns are done one by one
        yield from self._replies(present, gone, self._local.turns(present, broadcast))

    def ask(self, requests: Mapping[int, Message]) -> Iterator[Reply | Lost]:
        own: dict[int, dict[int, Message]] = defaultdict(dict)
        for client, request in requests.items():
            own[self._assignment[client]][client] = request
        here = [one for number, some in own.items() if number not in self._peers for one in some.items()]
        gone = self._sent({number: serialise("ask", together(own[number])) for number in self._processes(requests)})
        return self._replies(requests, gone, itertools.starmap(self._local.node.answer, here))

    def _processes(self, clients: Iterable[int]) -> list[int]:
        """The other processes that have some of these clients, ascending."""
        return sorted({self._assignment[client] for client in clients} & self._peers.keys())

    def _sent(self, requests: Mapping[int, bytes]) -> dict[int, str]:
        """Send each process its request; those that are gone, and why."""
        gone: dict[int, str] = {}
        for number, request in requests.items():
            self._peers[number].most = max(self.most, LONGEST_HEADER)
            try:
                self._peers[number].send(request)
            except Gone as error:
                gone[number] = str(error)
        return gone

    def _replies(self, clients: Iterable[int], gone: dict[int, str], own: Iterator[Reply]) -> Iterator[Reply | Lost]:
        """The clients' replies in their order; `own` are those of this process's."""
        turns = OwnTurns(own)
        for client in clients:
            number = self._assignment[client]
            if number not in self._peers:
                yield turns.next()
                continue
            while number not in gone and not self._peers[number].ready() and turns.work_ahead():
                pass
            yield self._reply(number, client, gone)

    def _reply(self, number: int, client: int, gone: dict[int, str]) -> Reply | Lost:
        peer = self._peers[number]
        if number in gone:
            return Lost(client, gone[number])
        try:
            reply = deserialise_reply(deserialise(peer.receive()))
        except Gone as error:
            gone[number] = str(error)
            return Lost(client, gone[number])
        if reply.client != client:
            raise BadMessage(f"{peer.name} answered for client {reply.client}, not {client}")
        return reply

    def refused(self, client: int) -> None:
        number = self._assignment[client]
        if number in self._peers:
            self._refused[number].append(client)
        else:
            self._local.node.rollback(client)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every process saves its clients' states on its own disk, all under one new name; this is that name."""
        tag = new_tag(*self._last)
        for number, peer in self._peers.items():
            peer.request("save", tag=tag, refused=self._refused.pop(number, []))
        self._local.save(tag)
        for peer in self._peers.values():
            peer.response("done")
        return as_state(tag)

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        for number, peer in self._peers.items():
            own = [client for client, other in enumerate(self._assignment) if other == number]
            peer.request("restore", Message(states if ELSEWHERE in states else of_clients(states, own)))
            peer.response("done")
        self._local.restore(states)

    def delete_states(self) -> None:
        """The run is complete: every process deletes its clients' states. One that is gone still has them."""
        for peer in self._peers.values():
            try:
                peer.request("delete")
                peer.response("done")
            except UserError as error:
                log.warning("%s; the states of its clients stay where they are", error.what)
        self._local.store.delete()
