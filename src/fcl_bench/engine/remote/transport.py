"""The near end: the server's process reaches clients in other processes through whatever carries bytes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from fcl_bench.engine.client_state import as_state, new_tag
from fcl_bench.engine.clients import Clients
from fcl_bench.engine.exchange import Late, Lost, Reply
from fcl_bench.engine.raw_cost import RawSamples
from fcl_bench.engine.remote.host import Host, states_of
from fcl_bench.engine.remote.process_info import ProcessInfo, counted, require_alike
from fcl_bench.engine.remote.replies import Received, deserialise, reply_heard, serialise
from fcl_bench.engine.remote.waiting import MOST, OwnTurns
from fcl_bench.errors import UserError
from fcl_bench.protocol.message import Message

log = logging.getLogger(__name__)


class Gone(Exception):
    """A process no longer answers; the message has the reason in a few words."""


class Channel(Protocol):
    """Carries requests to processes, and brings back each one's answers in the order in which it gave them.

    Attributes:
        names: of the processes, for messages.
    """

    @property
    def names(self) -> Sequence[str]: ...

    def send(self, process: int, request: bytes) -> None:
        """Raises `Gone` if nobody is there any more."""

    def receive(self, process: int) -> bytes | memoryview:
        """The next answer of a process. Raises `Gone` where none will come."""

    def ready(self, process: int) -> bool:
        """Whether `receive` does not have to wait."""


class Remote:
    """Clients in other processes, and perhaps some in this one.

    Answers are taken in client order; each process computes as far ahead as there is room for its answers, this one
    while the answer that is due has not come.

    Args:
        clients: of the whole federation.
        post: reaches the other processes.
        homes: client -> the process in which it lives; -1: this one.
        local: the clients of this process; None: it has none.
        most: bytes of this process's replies that may wait; a single larger one may, too.

    Raises:
        UserError: processes differ in what changes results, or clients live nowhere or twice.
    """

    everything = None
    complete = False

    def __init__(
        self, clients: Clients, post: Channel, homes: Sequence[int], local: Host | None = None, most: int = MOST
    ) -> None:
        self.clients, self._most = clients.count, most
        self._post, self._homes, self._local = post, list(homes), local
        self._last = (0, 0)
        #: Per process, the clients whose uploads were refused since it was last spoken to.
        self._refused: dict[int, list[int]] = {}
        self.censuses = self._census(clients)
        self._samples, self._labelled = counted(self.censuses, clients.count, clients.tasks)

    def _census(self, clients: Clients) -> list[ProcessInfo]:
        others = sorted({home for home in self._homes if home >= 0})
        for process in others:
            self._ask(process, "census")
        found = [ProcessInfo(**self._hear(process, "census").beside) for process in others]
        own = [] if self._local is None else [self._local.census]
        require_alike(ProcessInfo.of("the server", clients, []), found)
        return [*own, *found]

    @property
    def raw(self) -> RawSamples | None:
        said_so = [census.raw for census in self.censuses if census.raw is not None]
        return RawSamples(**said_so[0]) if said_so else None

    def samples(self, task: int) -> tuple[np.ndarray, np.ndarray]:
        return self._samples[task], self._labelled[task]

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Reply | Lost | Late]:
        self._last = broadcast.task, broadcast.round
        gone: dict[int, str] = {}
        asked = sorted({home for client in present if (home := self._homes[client]) >= 0})
        # One request for all: each process finds its own clients in it.
        request = (
            serialise("exchange", broadcast, clients=list(present), refused=self._to_take_back(asked)) if asked else b""
        )
        for process in asked:
            try:
                self._post.send(process, request)
            except Gone as error:
                gone[process] = str(error)
        del request
        if self._local is not None:
            self._local.node.commit()  # at once, though its turns are done one by one
        own = OwnTurns(iter(()) if self._local is None else self._local.turns(present, broadcast), self._most)
        for client in present:
            process = self._homes[client]
            if process < 0:
                yield own.next()
            elif process in gone:
                yield Lost(client, gone[process])
            else:
                while not self._post.ready(process) and own.work_ahead():
                    pass
                yield self._reply(process, client, gone)

    def _reply(self, process: int, client: int, gone: dict[int, str]) -> Reply | Lost:
        try:
            reply = reply_heard(deserialise(self._post.receive(process)))
        except Gone as error:
            gone[process] = str(error)
            return Lost(client, gone[process])
        if reply.client != client:
            raise ValueError(f"{self._post.names[process]} answered for client {reply.client}, not {client}")
        return reply

    def refused(self, client: int) -> None:
        process = self._homes[client]
        if process >= 0:
            self._refused.setdefault(process, []).append(client)
        elif self._local is not None:
            self._local.node.rollback(client)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every process keeps its clients' states on its own disk, all under one new name; returns that name."""
        tag = new_tag(*self._last)
        others = sorted({home for home in self._homes if home >= 0})
        for process in others:
            self._ask_or_end(process, "save", tag=tag)
        if self._local is not None:
            self._local.save(tag)
        for process in others:
            self._hear_or_end(process, "saved")
        return as_state(tag)

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        for process in sorted({home for home in self._homes if home >= 0}):
            own = [client for client, home in enumerate(self._homes) if home == process]
            self._ask_or_end(process, "restore", states_of(states, own))
            self._hear_or_end(process, "restored")
        if self._local is not None:
            self._local.restore(dict(states_of(states, self._local.own)))

    def forget(self) -> None:
        """The run is complete: every process deletes what its clients kept. One that is gone keeps it."""
        for process in sorted({home for home in self._homes if home >= 0}):
            try:
                self._ask(process, "forget")
                self._hear(process, "forgotten")
            except Gone as error:
                name = self._post.names[process]
                log.warning("%s could not be told that the run is complete: %s", name, error)
        if self._local is not None:
            self._local.forget()

    def _to_take_back(self, processes: Sequence[int]) -> list[int]:
        return [client for process in processes for client in self._refused.pop(process, ())]

    def _ask(self, process: int, kind: str, message: Message | None = None, **beside: object) -> None:
        self._post.send(process, serialise(kind, message, **beside, refused=self._to_take_back([process])))

    def _hear(self, process: int, kind: str) -> Received:
        answer = deserialise(self._post.receive(process))
        if answer.kind != kind:
            raise ValueError(f"{self._post.names[process]} answered {answer.kind}, not {kind}")
        return answer

    def _ask_or_end(self, process: int, kind: str, message: Message | None = None, **beside: object) -> None:
        try:
            self._ask(process, kind, message, **beside)
        except Gone as error:
            raise lost(self._post.names[process], error) from error

    def _hear_or_end(self, process: int, kind: str) -> Received:
        try:
            return self._hear(process, kind)
        except Gone as error:
            raise lost(self._post.names[process], error) from error


def lost(process: str, error: Exception) -> UserError:
    """The error with which a run ends that cannot continue without a process."""
    return UserError(f"{process} was lost: {error}", "the same command goes on from the last checkpoint")
