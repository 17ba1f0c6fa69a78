"""Progress without a terminal: one line per minute, and a text on request."""

from __future__ import annotations

import sys
import time
from typing import Protocol

from fcl_bench.tracking.lines import say

#: Seconds between two lines, and before the first one.
_EVERY = 60.0


class Progress(Protocol):
    """Receives the number of units done since the last call. It is a context manager; at its end, the work is over."""

    def update(self, n: float | None = 1) -> object:
        """`n` more units are done."""

    def __enter__(self) -> Progress: ...

    def __exit__(self, *raised: object) -> object: ...


#: The pieces of work in progress in this process, the innermost last.
_CURRENT: list[ProgressLines] = []


class ProgressLines:
    """Progress in a log file: `learning: 31 of 50 rounds, about 40 s left`, once a minute.

    Args:
        total: the number of units of work.
        what: the text before the numbers.
        unit: what is counted ("image"); bytes ("B") are shown in millions.
        done: units that an earlier, interrupted pass already did (not counted in the rate).
    """

    def __init__(self, total: int, what: str, unit: str, done: int = 0) -> None:
        self._total, self._what, self._unit = total, what, unit
        self._before = self._done = float(done)
        self._begin = self._told = time.monotonic()

    def update(self, n: float | None = 1) -> None:
        """`n` more units are done."""
        self._done += n or 0
        now = time.monotonic()
        if now - self._told >= _EVERY:
            self._told = now
            say(self.text(), sys.stderr)

    def text(self) -> str:
        """The progress so far, and the approximate time left at the rate so far."""
        if self._unit == "B":
            counted = f"{self._done / 1e6:.0f} of {self._total / 1e6:.0f} MB"
        else:
            counted = f"{self._done:.0f} of {self._total} {self._unit}s"
        fresh, seconds = self._done - self._before, time.monotonic() - self._begin
        if not fresh or self._done >= self._total:
            return f"{self._what}: {counted}"
        return f"{self._what}: {counted}, about {duration((self._total - self._done) * seconds / fresh)} left"

    def __enter__(self) -> ProgressLines:
        _CURRENT.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        _CURRENT.remove(self)


def current_progress() -> str:
    """The progress that no terminal shows; "" if there is none. It may be called from any thread."""
    return next((work.text() for work in _CURRENT[-1:]), "")


def duration(seconds: float) -> str:
    """Format seconds as `40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
