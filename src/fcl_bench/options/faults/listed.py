"""Faults by list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fcl_bench.config import knob
from fcl_bench.errors import UserError
from fcl_bench.options.faults.base import Fate, Faults

#: Client, task and, where it is not all of the task's rounds, the round.
_ENTRY = re.compile(r"(\d{1,9})@(\d{1,9})(?:\.(\d{1,9}))?", re.ASCII)


@dataclass
class ListedFaults(Faults):
    """Faults at the listed clients, tasks and rounds, all counted from 0.

    Args:
        silent, late: entries CLIENT@TASK, for all rounds of the task, or CLIENT@TASK.ROUND.
        gone: entries CLIENT@TASK: the client has left from that task on.
    """

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
