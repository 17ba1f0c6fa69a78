"""What becomes of each client that is asked for an upload: by list, or by probability."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import numpy as np

from fcl_bench.config import knob
from fcl_bench.errors import UserError
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

    late_by: int = knob(1, least=1)
    late_unit: str = knob("round", choices=("round", "task"))
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
