"""What becomes of each client that is asked, by list or by probability; the transport that carries it out."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import torch

from fcl_bench.config import knob
from fcl_bench.engine.blob import packed, unpacked
from fcl_bench.engine.exchange import Answer, Late, Lost, Reply
from fcl_bench.engine.transport import Transport, Wrapper
from fcl_bench.errors import UserError
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import generator


class Fate(Enum):
    """What becomes of a client that a round asks for an upload."""

    ANSWERS = "answers"
    SILENT = "silent"  # it does nothing this time
    LATE = "late"  # it does its work, and the upload arrives in a later round
    GONE = "gone"  # it has left for good


@dataclass
class Faults(ABC):
    """Clients that fail."""

    name: ClassVar[str]
    fails: ClassVar[bool] = True
    #: How often silent clients are asked again before the run gives up.
    attempts: ClassVar[int] = 20

    late_by: int = knob(1, least=1, of="late")
    late_unit: str = knob("round", choices=("round", "task"), of="late")
    min_clients: int = knob(1, least=0)

    def check(self, clients: int, tasks: int) -> None:
        """Raise a `UserError` for knobs that K clients or T tasks rule out, before any work is done."""
        if self.min_clients > clients:
            raise UserError(f"faults.min_clients={self.min_clients} with clients={clients}", f"0 to {clients}")

    @abstractmethod
    def fates(self, seed: int, clients: int, task: int, round_: int, attempt: int) -> np.ndarray:
        """(K,) what becomes of each client when it is asked, `Fate` objects.

        Args:
            clients: K.
            attempt: how often the round has been asked before; 0: the first time.
        """


#: Client, task and, where it is not all of the task's rounds, the round.
_ENTRY = re.compile(r"(\d{1,9})@(\d{1,9})(?:\.(\d{1,9}))?", re.ASCII)


@dataclass
class ListedFaults(Faults):
    """Faults at the listed clients, tasks and rounds, all counted from 0."""

    name: ClassVar[str] = "listed"
    #: A silent client stays silent, however often it is asked.
    attempts: ClassVar[int] = 0

    silent: list[str] = knob(list)
    late: list[str] = knob(list)
    gone: list[str] = knob(list)

    def __post_init__(self) -> None:
        for key in ("silent", "late", "gone"):
            for entry in getattr(self, key):
                found = _ENTRY.fullmatch(entry)
                if found is None or (key == "gone" and found[3] is not None):
                    form = "CLIENT@TASK" if key == "gone" else "CLIENT@TASK or CLIENT@TASK.ROUND"
                    raise UserError(f"faults.{key} has the entry {entry!r}", f"{form}, numbers from 0, such as 3@1")

    def check(self, clients: int, tasks: int) -> None:
        super().check(clients, tasks)
        if not (self.silent or self.late or self.gone):
            raise UserError("faults=listed lists no client that fails", "faults.silent=[1@0], or faults=none")
        for key in ("silent", "late", "gone"):
            for client, task, _ in _numbers(getattr(self, key)):
                for kind, number, count in (("client", client, clients), ("task", task, tasks)):
                    if number >= count:
                        raise UserError(
                            f"faults.{key} names {kind} {number}, and there are {count}", f"0 to {count - 1}"
                        )

    def fates(self, seed: int, clients: int, task: int, round_: int, attempt: int) -> np.ndarray:
        found = np.full(clients, Fate.ANSWERS, dtype=object)
        for fate, entries in ((Fate.LATE, self.late), (Fate.SILENT, self.silent), (Fate.GONE, self.gone)):
            for client, at, within in _numbers(entries):
                if at <= task if fate is Fate.GONE else at == task and within in (None, round_):
                    found[client] = fate
        return found


def _numbers(entries: Sequence[str]) -> list[tuple[int, int, int | None]]:
    """Client, task and round of each entry."""
    parts = [_ENTRY.fullmatch(entry) for entry in entries]
    return [(int(at[1]), int(at[2]), None if at[3] is None else int(at[3])) for at in parts if at]


def _probability(default: float) -> Any:
    return knob(default, least=0, most=1, words="a probability, 0 to 1")


@dataclass
class RandomFaults(Faults):
    """Each client draws its own fate in each round, from the run's seed.

    Args:
        silent: probability that a client does not answer a round.
        late: probability that its upload of a round comes late.
        gone: probability that a client leaves for good at the start of a task.
    """

    name: ClassVar[str] = "random"

    silent: float = _probability(0.1)
    late: float = _probability(0.0)
    gone: float = _probability(0.0)

    def __post_init__(self) -> None:
        if self.silent + self.late > 1:
            raise UserError(
                f"faults.silent={self.silent:g} and faults.late={self.late:g} add up to more than 1",
                "probabilities that add up to 1 or less",
            )

    def fates(self, seed: int, clients: int, task: int, round_: int, attempt: int) -> np.ndarray:
        draw = generator(seed, "faults", task, round_, attempt).random(clients)
        found = np.full(clients, Fate.ANSWERS, dtype=object)
        found[draw < self.silent + self.late] = Fate.LATE
        found[draw < self.silent] = Fate.SILENT
        if self.gone:
            # The number of tasks up to the one at whose start a client leaves, that one included.
            found[generator(seed, "faults: gone").geometric(self.gone, clients) <= task + 1] = Fate.GONE
        return found


#: Prefix of a checkpoint's tensors of uploads on their way; names of clients' states begin with the client's number.
_LATE, _EXCHANGES = "late.", "exchanges"


@dataclass(frozen=True)
class _OnItsWay:
    """A late upload, and the exchange or the task with which it arrives."""

    client: int
    upload: Message
    due: int


class Faulty(Wrapper):
    """Simulates faults between the loop and a transport.

    A client that is silent or gone is never asked, so it computes nothing and receives nothing. A late client has its
    turn in time, and its upload arrives at the beginning of a later exchange, before that round's own uploads. An
    upload that is still on its way when the run ends never arrives.
    """

    def __init__(self, inner: Transport, faults: Faults, seed: int) -> None:
        super().__init__(inner)
        self._faults, self._seed = faults, seed
        self._on_their_way: list[_OnItsWay] = []
        self._exchanges = 0

    def exchange(self, present: Sequence[int], broadcast: Message) -> Iterator[Answer]:
        """First the late uploads that arrive, in order of task, round and client; then the clients of `present`."""
        task, by_task = broadcast.task, self._faults.late_unit == "task"
        now = task if by_task else self._exchanges
        self._exchanges += 1
        arriving = [late for late in self._on_their_way if late.due <= now]
        self._on_their_way = [late for late in self._on_their_way if late.due > now]
        for late in arriving:
            yield Reply(late.client, late.upload, 0.0, None, {}, 0)
        del arriving
        fates = self._fates(present, task, broadcast.round)
        answering = [client for client in present if fates[client] in (Fate.ANSWERS, Fate.LATE)]
        replies = self._inner.exchange(answering, broadcast)
        for client in present:
            fate = fates[client]
            if fate in (Fate.SILENT, Fate.GONE):
                yield Lost(client, fate.value)
                continue
            reply = next(replies)
            if fate is Fate.ANSWERS or not isinstance(reply, Reply):
                yield reply
                continue
            self._on_their_way.append(_OnItsWay(client, reply.upload, now + self._faults.late_by))
            yield Late(reply)

    def ask(self, requests: Mapping[int, Message]) -> Iterator[Reply | Lost]:
        """Only clients that are gone do not answer: silent and late clients fail with their upload only."""
        faults, there = self._faults, {}
        for client, request in requests.items():
            fates = faults.fates(self._seed, self.clients, request.task, request.round, 0)
            if fates[client] is Fate.GONE:
                yield Lost(client, Fate.GONE.value)
            else:
                there[client] = request
        yield from super().ask(there)

    def _fates(self, present: Sequence[int], task: int, round_: int) -> np.ndarray:
        """(K,) the fate of each client; silent clients are asked again until enough of `present` answer."""
        faults, chosen = self._faults, np.asarray(present, dtype=int)
        wanted = 0 if self._alone(present, task) else min(faults.min_clients, len(chosen))
        fates = faults.fates(self._seed, self.clients, task, round_, 0)
        for attempt in range(1, 1 + faults.attempts):
            if sum(fate is Fate.ANSWERS for fate in fates[chosen]) >= wanted:
                return fates
            again = faults.fates(self._seed, self.clients, task, round_, attempt)
            fates = np.where([fate is Fate.SILENT for fate in fates], again, fates)
        answers = sum(fate is Fate.ANSWERS for fate in fates[chosen])
        if answers < wanted:
            raise UserError(
                f"{answers} of {len(chosen)} clients answer in task {task}, round {round_}, and it takes {wanted}",
                "fewer faults, or a smaller faults.min_clients (0: a round may go without an answer)",
            )
        return fates

    def _alone(self, present: Sequence[int], task: int) -> bool:
        """Whether a round asks one client where several have samples of the task: others have rounds of their own."""
        return len(present) == 1 and int(np.count_nonzero(self.samples(task)[1])) > 1

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the clients keep, and the uploads on their way."""
        saved = {_LATE + _EXCHANGES: torch.tensor(self._exchanges)}
        for number, late in enumerate(self._on_their_way):
            blob = packed(late.upload, client=late.client, due=late.due)
            saved[f"{_LATE}{number}"] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        return {**super().state_dict(), **saved}

    def load_state_dict(self, states: dict[str, torch.Tensor]) -> None:
        own = {name.removeprefix(_LATE): value for name, value in states.items() if name.startswith(_LATE)}
        super().load_state_dict({name: value for name, value in states.items() if not name.startswith(_LATE)})
        self._exchanges = int(own.pop(_EXCHANGES))
        self._on_their_way = []
        for number in sorted(own, key=int):
            upload, beside = unpacked(own[number].cpu().numpy().tobytes())
            self._on_their_way.append(_OnItsWay(beside["client"], upload, beside["due"]))
