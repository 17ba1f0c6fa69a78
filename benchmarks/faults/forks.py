"""Run commands in forked processes, which start at once, since their parent has imported everything."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

#: Exit code of a process that the shim stops, as the shell tells a kill -9.
KILLED = 137


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (minus the signal that killed it) and all that it printed."""

    code: int
    out: str
    err: str

    def trouble(self, codes: tuple[int, ...] = (0, 2), runs: int = 1) -> str:
        """A forbidden end in words: a hang, a traceback, another exit code, not 1 to `runs` error lines; "": none."""
        if self.code == -signal.SIGALRM:
            return "it hangs"
        for mark in ("Traceback (most recent call last)", "--- Logging error ---", "Exception ignored in"):
            if mark in self.out + self.err:
                return f"{mark}: {self.last()}"
        if self.code not in codes:
            return f"exit code {self.code}: {self.last()}"
        # A sweep whose jobs print into files says which of them failed, and why.
        errors = [line for line in self.err.splitlines() if re.search(r": error: |: run \d+ of \d+ failed: ", line)]
        if self.code == 2 and not 1 <= len(errors) <= runs:
            return f"{len(errors)} error lines with exit code 2: {self.last()}"
        if errors and (not errors[0].isprintable() or len(errors[0]) > 4500):
            return f"an error line of {len(errors[0])} characters, or one that is not printable"
        return ""

    def last(self) -> str:
        """The last line that it printed, stderr first."""
        return ((self.err.strip() or self.out.strip()).splitlines() or ["(it printed nothing)"])[-1][:300]


class Child:
    """A process that carries out `work`; see `started`."""

    def __init__(self, work: Callable[[], int], seconds: int, room: int) -> None:
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        sys.stdout.flush()
        sys.stderr.flush()
        self.process = os.fork()
        if self.process == 0:
            _child(work, self._out.fileno(), self._err.fileno(), seconds, room)

    def kill(self) -> None:
        """kill -9."""
        os.kill(self.process, signal.SIGKILL)

    def ended(self) -> Ended:
        """How it ended; waits for it."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        with self._out, self._err:
            return Ended(code, *(_content(file.fileno()) for file in (self._out, self._err)))


def started(work: Callable[[], int], seconds: int = 300, room: int = 0) -> Child:
    """A child of this process that has begun with `work`.

    Args:
        work: returns the exit code.
        seconds: after which it counts as hanging.
        room: bytes of address space that it may take beyond what this process has; 0 for no limit.
    """
    return Child(work, seconds, room)


def forked(work: Callable[[], int], seconds: int = 300, room: int = 0) -> Ended:
    """Run `work` in a child of this process and return how it ended; see `started`."""
    return started(work, seconds, room).ended()


def _child(work: Callable[[], int], out: int, err: int, seconds: int, room: int) -> None:
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        signal.alarm(seconds)  # whose default is to end the process, whatever it is at
        if room:
            pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
            limit = pages * os.sysconf("SC_PAGE_SIZE") + room
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        code = work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except KeyboardInterrupt:  # before the command could hear of it: Python ends by the signal too
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _content(handle: int) -> str:
    os.lseek(handle, 0, os.SEEK_SET)
    pieces = []
    while piece := os.read(handle, 1 << 20):
        pieces.append(piece)
    return b"".join(pieces).decode(errors="replace")


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which all output of this process is discarded."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for handle, place in zip(kept, (1, 2), strict=True):
            os.dup2(handle, place)
            os.close(handle)
        os.close(nowhere)
