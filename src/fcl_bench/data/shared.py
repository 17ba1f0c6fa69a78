"""A cache that the jobs of one process share: results of pure functions by their inputs, bounded in memory."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from fcl_bench.files import json_hash

Value = TypeVar("Value")
#: The largest number of bytes stored; a single value that is larger is not stored at all.
LIMIT = 2**30


class Shared:
    """A cache of values by key; the least recently used ones are dropped first.

    Callers must not change a value. What was logged while it was made is not logged again when it is reused.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.bytes = 0
        self._stored: OrderedDict[str, tuple[Any, int]] = OrderedDict()

    def get(self, key: str, make: Callable[[], Value], size: Callable[[Value], int]) -> Value:
        """The value of `key`: the stored one, or a new one from `make`; see `shared`."""
        if key in self._stored:
            self._stored.move_to_end(key)
            return self._stored[key][0]
        value = make()
        count = size(value)
        if count <= self.limit:
            self._stored[key] = value, count
            self.bytes += count
            while self.bytes > self.limit:
                self.bytes -= self._stored.popitem(last=False)[1][1]
        return value


#: The cache of this process's jobs while there are several; otherwise None, and nothing is stored.
_current: list[Shared] = []


def start_sharing() -> None:
    """Let the jobs of this process share results from now on."""
    if not _current:
        _current.append(Shared())


def stop_sharing() -> None:
    """Drop the stored values, and store none from now on."""
    _current.clear()


@contextmanager
def sharing() -> Iterator[None]:
    """A context in which jobs share results."""
    start_sharing()
    try:
        yield
    finally:
        stop_sharing()


def shared(kind: str, key: Any, make: Callable[[], Value], size: Callable[[Value], int]) -> Value:
    """The result of `make`, or that of an earlier job of this process; callers must not change it.

    Args:
        key: everything that determines the value, in JSON's types; None: unknown, so the value is always made anew.
    """
    if key is None or not _current:
        return make()
    return _current[0].get(json_hash([kind, key]), make, size)


def described(choice: Any) -> list[Any]:
    """A dataclass of knobs as a key: its class and all its values, whether or not they are part of a run's id."""
    kind = type(choice)
    return [kind.__module__, kind.__qualname__, dataclasses.asdict(choice)]
