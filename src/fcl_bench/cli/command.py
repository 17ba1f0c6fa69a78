"""What the four commands share: the handling of every kind of ending, and a parser with one-line errors."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from fcl_bench.errors import UserError, first_line, printable
from fcl_bench.tracking.console import drop_output

DONE, BUG, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
#: Signals that end a command like Ctrl-C; batch systems and a closing terminal send them.
_ENDING: dict[int, str] = {signal.SIGTERM: "terminated"}
if hasattr(signal, "SIGHUP"):  # not on Windows
    _ENDING[signal.SIGHUP] = "hung up"

#: The operating system's messages for storage that is full, closed or without locks, whichever library reports it.
_STORAGE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
    # Of network file systems: no locks, and a folder that the server has lost.
    *(errno.ENOLCK, errno.ENOTSUP, errno.ESTALE),
}


class _Ended(KeyboardInterrupt):
    """One of the signals in `_ENDING`; as a KeyboardInterrupt, it passes through all code that lets those through."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_command(name: str, work: Callable[[], int], when_interrupted: str = "") -> int:
    """Do `work`; the exit code is 2 for wrong input, 130 if interrupted (SIGTERM 143, SIGHUP 129), 1 for a bug."""
    for stream_name in ("stdout", "stderr"):
        if getattr(sys, stream_name) is None:  # closed (`>&-`)
            setattr(sys, stream_name, open(os.devnull, "w"))  # noqa: SIM115  # as long as the process
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a character that the encoding lacks must not end it
    try:
        with _ended_by_signals():
            code = work()
            sys.stdout.flush()
        return code
    except KeyboardInterrupt as error:
        code = interrupted(error)
        remedy = f" ({when_interrupted})" if when_interrupted else ""
        _tell(f"{name}: {_ENDING.get(code - 128, 'interrupted')}{remedy}\n")
        return code
    except Exception as error:
        return report_failure(name, storage_error(error) or error)[0]


def interrupted(error: KeyboardInterrupt) -> int:
    """The exit code of a process that was interrupted by one of these signals or by Ctrl-C."""
    return 128 + (error.number if isinstance(error, _Ended) else signal.SIGINT)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the block like Ctrl-C; a signal that the user ignores (nohup) stays ignored."""

    def end(number: int, frame: FrameType | None) -> None:
        raise _Ended(number)

    main = threading.current_thread() is threading.main_thread()
    caught = [number for number in _ENDING if main and signal.getsignal(number) == signal.SIG_DFL]
    for number in caught:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


def report_failure(name: str, error: Exception, complete: bool = True) -> tuple[int, str]:
    """Tell the user of the command `name` what went wrong; return the exit code and the reason in one line.

    Args:
        complete: whether only the printing of the result can have failed, so that a reader that has gone is no failure.
    """
    if complete and isinstance(error, BrokenPipeError):
        # The reader of our output (`| head`) has gone; all files are written by then.
        drop_output()
        return DONE, ""
    if isinstance(error, UserError):
        _tell(f"{name}: error: {error}\n")
        return USER_ERROR, str(error)
    _tell(printable("".join(traceback.format_exception(error))))
    return BUG, f"{type(error).__name__}: {first_line(error)}"


def _tell(text: str) -> None:
    """Print on stderr; the exit code says the same where nobody can read it: a reader or terminal gone, a full disk."""
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except OSError:
        drop_output(sys.stderr)


def storage_error(error: Exception, remedy: str = "a folder with room to write") -> UserError | None:
    """A `UserError` for a full disk and the like, else None; safetensors says it only in its error's text."""
    if isinstance(error, OSError) and error.errno in _STORAGE:
        reason = f"{error.filename2 or error.filename or 'a file'}: {error.strerror}"
    elif type(error).__name__ == "SafetensorError" and "os error" in str(error):
        reason = first_line(error)
    else:
        return None
    return UserError(f"writing failed, {reason}", remedy)


class Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors, like the rest of the project."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        options = re.findall(r"--[a-z][\w-]+", self.format_help()) if unknown else []
        near = difflib.get_close_matches(unknown[1], options, n=1) if unknown else []
        raise UserError(message, f"{f'did you mean {near[0]}? ' if near else ''}{self.prog} --help lists the options")
