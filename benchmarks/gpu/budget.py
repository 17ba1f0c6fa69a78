"""Commands one after the other within a budget of minutes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

#: Seconds that a command has between the signal that asks it to end and the one that ends it.
GRACE = 20.0
#: What became of a command.
DONE, FAILED, CUT, NOT_BEGUN = "done", "failed", "cut", "not begun"


@dataclass(frozen=True)
class Outcome:
    """What became of a command.

    Attributes:
        name: the command's, in tables.
        state: done (exit code 0), failed (another one), cut (it ran out of time), not begun.
        seconds: it ran.
    """

    name: str
    state: str
    seconds: float


class Budget:
    """Minutes, from now on, for commands.

    Args:
        minutes: in all.
        clock: seconds.
    """

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + 60 * minutes

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - self._clock()

    def run(self, name: str, command: Sequence[str], least: float = 0.0) -> Outcome:
        """Run a command until it ends or the budget does; it is asked to end by SIGTERM, and then has `GRACE`.

        Args:
            name: for the outcome.
            command: its words.
            least: seconds; if fewer are left, the command is not begun.
        """
        if self.left <= least:
            return Outcome(name, NOT_BEGUN, 0.0)
        begin = self._clock()
        process = subprocess.Popen(command, start_new_session=True)
        try:
            process.wait(max(0.0, self.left))
        except subprocess.TimeoutExpired:
            _end(process)
            return Outcome(name, CUT, self._clock() - begin)
        except BaseException:
            _end(process)
            raise
        return Outcome(name, FAILED if process.returncode else DONE, self._clock() - begin)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a command to end, then end it and whatever it has started and left."""
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: a row for each command."""
    rows = [("what", "state", "seconds"), ("---",) * 3]
    rows += [(own.name, own.state, f"{own.seconds:.0f}") for own in outcomes]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
