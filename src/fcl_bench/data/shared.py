"""What the jobs of one process share: results of pure work, kept by what determines them, bounded in memory."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fcl_bench.files import json_hash

Value = TypeVar("Value")
#: Bytes that are kept at most; what is larger on its own is not kept at all.
LIMIT = 2**30
#: Seconds since a file's last change from which on its next one shows: the coarsest clock of a usual file system.
_SETTLED = 2.0
_package = logging.getLogger("fcl_bench")


class Shared:
    """Values that are kept by key, the longest unused ones going first.

    Whoever gets a value must not change it. What the package logged while a value was made is logged again whenever it
    is taken over, if it is of the value, so that each job says what it would say alone.

    Args:
        limit: bytes that are kept at most.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.bytes = 0
        self._kept: OrderedDict[str, tuple[Any, int, list[logging.LogRecord]]] = OrderedDict()

    def get(self, key: str, make: Callable[[], Value], size: Callable[[Value], int], of_value: bool = True) -> Value:
        """The value of `key`: what is kept, or what `make` makes; see `shared`."""
        if key in self._kept:
            self._kept.move_to_end(key)
            value, _, said = self._kept[key]
            for record in said:
                logging.getLogger(record.name).log(record.levelno, record.msg, *(record.args or ()))
            return value
        with _listening() as said:
            value = make()
        count = size(value)
        if count <= self.limit:
            self._kept[key] = value, count, said if of_value else []
            self.bytes += count
            while self.bytes > self.limit:
                self.bytes -= self._kept.popitem(last=False)[1][1]
        return value

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self.bytes = 0


class _Said(logging.Handler):
    """Puts what is logged into a list."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def _listening() -> Iterator[list[logging.LogRecord]]:
    handler = _Said()
    _package.addHandler(handler)
    try:
        yield handler.records
    finally:
        _package.removeHandler(handler)


#: That of the jobs of this process, while there are several; else none, and nothing is kept.
_current: list[Shared] = []


def start_sharing() -> None:
    """Have the jobs of this process share from now on."""
    if not _current:
        _current.append(Shared())


def stop_sharing() -> None:
    """Forget what was kept, and keep no more."""
    _current.clear()


def is_sharing() -> bool:
    """Whether jobs of this process share."""
    return bool(_current)


@contextmanager
def sharing() -> Iterator[None]:
    """A block whose jobs share."""
    start_sharing()
    try:
        yield
    finally:
        stop_sharing()


def shared(
    kind: str, key: Any, make: Callable[[], Value], size: Callable[[Value], int], of_value: bool = True
) -> Value:
    """What `make` makes, or an earlier job of this process made; to be read only.

    Args:
        kind: of what.
        key: everything that determines it, in JSON's types; None: nobody knows, so it is always made.
        make: has no other effect than what it logs.
        size: bytes of what it made.
        of_value: whether what it logs is of the value, or else of this one making of it.
    """
    if key is None or not _current:
        return make()
    return _current[0].get(json_hash([kind, key]), make, size, of_value)


def described(choice: Any) -> list[Any]:
    """A dataclass of knobs as a key: its class, and all its values, whether or not they count in a run's id."""
    kind = type(choice)
    return [kind.__module__, kind.__qualname__, dataclasses.asdict(choice)]


def state_of(paths: Iterable[Path]) -> list[list[object]] | None:
    """What changes whenever a file at or below `paths` does, comes or goes; None where that can't be told for sure.

    It is names, inode numbers, sizes and both times of each file, of which no program can set the second. A file that
    has changed just now may change again within the same tick of the file system's clock, and folders behind links
    are not walked through: of these nothing is told.
    """
    found: list[list[object]] = []
    newest = 0.0
    for path in sorted(path.absolute() for path in paths):
        for file in _walked(path):
            if file is None:
                return None
            try:
                there = file.stat()
            except FileNotFoundError:
                found.append([str(file)])
                continue
            except OSError:
                return None
            newest = max(newest, there.st_mtime, there.st_ctime)
            found.append([str(file), there.st_ino, there.st_size, there.st_mtime_ns, there.st_ctime_ns])
    return found if newest < time.time() - _SETTLED else None


def _walked(path: Path) -> Iterator[Path | None]:
    """A file, or all of a folder in a fixed order; None for a link to a folder."""
    yield path
    if not path.is_dir():
        return
    for folder, folders, files in os.walk(path):
        folders.sort()
        for name in folders:
            below = Path(folder, name)
            yield None if below.is_symlink() else below
        yield from (Path(folder, name) for name in sorted(files))
