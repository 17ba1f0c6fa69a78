"""The near end: the server's process reaches clients in other processes through whatever carries bytes."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fcl_bench.engine.client_state import ELSEWHERE, as_state, new_tag, of_clients
from fcl_bench.engine.clients import Clients
from fcl_bench.engine.exchange import Late, Lost, Reply
from fcl_bench.engine.raw_cost import RawSamples
from fcl_bench.engine.remote.host import Host
from fcl_bench.engine.remote.process_info import ProcessInfo, counted, require_alike
from fcl_bench.engine.remote.replies import Received, deserialise, deserialise_reply, serialise
from fcl_bench.engine.remote.waiting import MOST, OwnTurns
from fcl_bench.errors import UserError
from fcl_bench.protocol.message import Message

log = logging.getLogger(__name__)


class Gone(Exception):
    """A process no longer answers; the message has the reason in a few words."""


class Channel(ABC):
    """Carries requests to processes, and brings back each one's answers in the order in which it gave them.

    Attributes:
        names: of the processes, for messages.
    """

    names: Sequence[str]

    @abstractmethod
    def send(self, process: int, request: bytes) -> None:
        """Raises `Gone` if nobody is there any more."""

    @abstractmethod
    def receive(self, process: int) -> bytes | memoryview:
        """The next answer of a process. Raises `Gone` where none will come."""

    @abstractmethod
    def ready(self, process: int) -> bool:
        """Whether `receive` does not have to wait."""

    def request(self, process: int, kind: str, message: Message | None = None, **beside: object) -> None:
        """Send a request. Raises a `UserError` if the process is gone: the run cannot continue without it."""
        try:
            self.send(process, serialise(kind, message, **beside))
        except Gone as error:
            raise lost(self.names[process], error) from error

    def response(self, process: int, kind: str) -> Received:
        """The next answer, which has to be of this kind. Raises as `request` does."""
        try:
            answer = deserialise(self.receive(process))
        except Gone as error:
            raise lost(self.names[process], error) from error
        if answer.kind != kind:
            raise ValueError(f"{self.names[process]} answered {answer.kind}, not {kind}")
        return answer


def lost(process: str, error: Exception) -> UserError:
    """The error with which a run ends that cannot continue without a process."""
    return UserError(f"{process} was lost: {error}", "the same command goes on from the last checkpoint")


class Remote:
    """Clients in other processes, and perhaps some in this one.

    Answers are taken in client order; each process computes as far ahead as there is room for its answers, this one
    while the answer that is due has not come.

    Args:
        clients: of the whole federation.
        channel: reaches the other processes.
        assignment: client -> its process; -1: this one.
        local: the clients of this process; None: it has none.
        most: bytes of this process's replies that may wait; a single larger one may, too.

    Raises:
        UserError: processes differ in what changes results, or a client is in none or in two.
    """

    everything = None
    complete = False

    def __init__(
        self,
        clients: Clients,
        channel: Channel,
        assignment: Sequence[int],
        local: Host | None = None,
        most: int = MOST,
    ) -> None:
        self.clients, self._most = clients.count, most
        self._channel, self._process_of, self._local = channel, list(assignment), local
        self._others = sorted({process for process in assignment if process >= 0})
        self._last = (0, 0)
        #: Per process, the clients whose uploads were refused since it was last sent a request.
        self._refused: dict[int, list[int]] = {}
        self._infos = self._process_infos(clients)
        self._samples, self._labelled = counted(self._infos, clients.count, clients.tasks)

    def _process_infos(self, clients: Clients) -> list[ProcessInfo]:
        for process in self._others:
            self._request(process, "info")
        found = [ProcessInfo.read(self._channel.response(process, "info").beside) for process in self._others]
        require_alike(ProcessInfo.of("the server", clients, []), found)
        return found if self._local is None else [self._local.info, *found]

    @property
    def raw(self) -> RawSamples | None:
        return next((info.raw for info in self._infos if info.raw is not None), None)

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        return self._samples[task], self._labelled[task]

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Reply | Lost | Late]:
        self._last = broadcast.task, broadcast.round
        gone: dict[int, str] = {}
        requested = sorted({process for client in present if (process := self._process_of[client]) >= 0})
        if requested:
            # One request for all: each process finds its own clients in it.
            refused = self._take_refused(requested)
            request = serialise("exchange", broadcast, clients=list(present), refused=refused)
            for process in requested:
                try:
                    self._channel.send(process, request)
                except Gone as error:
                    gone[process] = str(error)
            del request
        if self._local is not None:
            self._local.node.commit()  # at once, though its turns are done one by one
        own = OwnTurns(iter(()) if self._local is None else self._local.turns(present, broadcast), self._most)
        for client in present:
            process = self._process_of[client]
            if process < 0:
                yield own.next()
            elif process in gone:
                yield Lost(client, gone[process])
            else:
                while not self._channel.ready(process) and own.work_ahead():
                    pass
                yield self._reply(process, client, gone)

    def _reply(self, process: int, client: int, gone: dict[int, str]) -> Reply | Lost:
        try:
            reply = deserialise_reply(deserialise(self._channel.receive(process)))
        except Gone as error:
            gone[process] = str(error)
            return Lost(client, gone[process])
        if reply.client != client:
            raise ValueError(f"{self._channel.names[process]} answered for client {reply.client}, not {client}")
        return reply

    def refused(self, client: int) -> None:
        process = self._process_of[client]
        if process >= 0:
            self._refused.setdefault(process, []).append(client)
        elif self._local is not None:
            self._local.node.rollback(client)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every process saves its clients' states on its own disk, all under one new name; this is that name."""
        tag = new_tag(*self._last)
        for process in self._others:
            self._request(process, "save", tag=tag)
        if self._local is not None:
            self._local.save(tag)
        for process in self._others:
            self._channel.response(process, "saved")
        return as_state(tag)

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        for process in self._others:
            own = [client for client, other in enumerate(self._process_of) if other == process]
            self._request(process, "restore", Message(states if ELSEWHERE in states else of_clients(states, own)))
            self._channel.response(process, "restored")
        if self._local is not None:
            self._local.restore(states)

    def delete_states(self) -> None:
        """The run is complete: every process deletes its clients' states. One that is gone still has them."""
        for process in self._others:
            try:
                self._request(process, "delete")
                self._channel.response(process, "deleted")
            except UserError as error:
                log.warning("%s; the states of its clients stay where they are", error.what)
        if self._local is not None:
            self._local.delete()

    def _take_refused(self, processes: Sequence[int]) -> list[int]:
        return [client for process in processes for client in self._refused.pop(process, ())]

    def _request(self, process: int, kind: str, message: Message | None = None, **beside: object) -> None:
        self._channel.request(process, kind, message, **beside, refused=self._take_refused([process]))
