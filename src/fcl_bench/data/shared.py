"""A cache that the jobs of one process share: results of pure functions by their inputs, bounded in memory."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from typing import Any, TypeVar

from fcl_bench.files import json_hash

Value = TypeVar("Value")
#: The largest number of bytes stored; a single value that is larger is not stored at all.
LIMIT = 2**30
_package = logging.getLogger("fcl_bench")


class Shared:
    """A cache of values by key; the least recently used ones are dropped first.

    Callers must not change a value. Messages that the package logged while a value was made are logged again whenever
    the value is reused, if they concern the value (`of_value`), so that each job logs what it would log alone.

    Args:
        limit: the largest number of bytes stored.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.bytes = 0
        self._stored: OrderedDict[str, tuple[Any, int, list[logging.LogRecord]]] = OrderedDict()

    def get(self, key: str, make: Callable[[], Value], size: Callable[[Value], int], of_value: bool = True) -> Value:
        """The value of `key`: the stored one, or a new one from `make`; see `shared`."""
        if key in self._stored:
            self._stored.move_to_end(key)
            value, _, records = self._stored[key]
            for record in records:
                logging.getLogger(record.name).log(record.levelno, record.msg, *(record.args or ()))
            return value
        messages = BufferingHandler(sys.maxsize)
        _package.addHandler(messages)
        try:
            value = make()
        finally:
            _package.removeHandler(messages)
        count = size(value)
        if count <= self.limit:
            self._stored[key] = value, count, messages.buffer if of_value else []
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


def shared(
    kind: str, key: Any, make: Callable[[], Value], size: Callable[[Value], int], of_value: bool = True
) -> Value:
    """The result of `make`, or that of an earlier job of this process; callers must not change it.

    Args:
        kind: of what.
        key: everything that determines the value, in JSON's types; None: unknown, so the value is always made anew.
        make: makes the value; it has no side effects except log messages.
        size: the size of a value in bytes.
        of_value: whether its log messages concern the value; otherwise they concern only this call.
    """
    if key is None or not _current:
        return make()
    return _current[0].get(json_hash([kind, key]), make, size, of_value)


def described(choice: Any) -> list[Any]:
    """A dataclass of knobs as a key: its class and all its values, whether or not they are part of a run's id."""
    kind = type(choice)
    return [kind.__module__, kind.__qualname__, dataclasses.asdict(choice)]
