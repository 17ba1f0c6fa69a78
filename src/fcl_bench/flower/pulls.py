"""Answers from Flower's grid, each pulled by itself: one node that dies while it sends delays no other answer.

Flower waits for minutes for the rest of an answer whose node died while it sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from flwr.app import Message
from flwr.serverapp import Grid


class Pulls:
    """The pulls under way of a grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid, self._pool = grid, ThreadPoolExecutor(32)
        self._pulls: dict[str, Future[Iterable[Message]]] = {}

    def answers(self, wanted: Collection[str]) -> Iterator[Message]:
        """The answers that are there to some messages, given by their names; the others come with a later call."""
        for name in set(wanted) - self._pulls.keys():
            self._pulls[name] = self._pool.submit(self._grid.pull_messages, [name])
        asked = list(wanted)  # the caller takes off what is answered
        wait([self._pulls[name] for name in asked], 0.1)
        for name in asked:
            if self._pulls[name].done():
                yield from self._pulls.pop(name).result()
