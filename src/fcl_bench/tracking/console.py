"""Output on the terminal: log lines, progress bars, notices that appear once, and what goes to a file instead."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from fcl_bench.errors import printable
from fcl_bench.tracking.progress import Progress, ProgressLines

log = logging.getLogger(__name__)

#: The name of the log handlers that write to the terminal.
_TERMINAL = "terminal"


@contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """Append to the file `path` what Python prints and logs in the block, on either stream."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", buffering=1, errors="backslashreplace") as file, redirect_stdout(file), redirect_stderr(file):
        yield


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Append to the file `path` what this process prints in the block, on either stream and from any library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    streams = (1, 2)
    before = [os.dup(stream) for stream in streams]
    try:
        with path.open("ab") as file:
            for stream in streams:
                os.dup2(file.fileno(), stream)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, old in zip(streams, before, strict=True):
            os.dup2(old, stream)
            os.close(old)


def log_to_terminal(prefix: str, kept: list[str] | None = None, notes: bool = True) -> None:
    """Send the package's warnings to stderr and its notes to stdout; this replaces the effect of an earlier call.

    Args:
        prefix: the text before each line: the command's name.
        kept: a list to which each warning's text is also added, once.
        notes: whether notes are shown at all.
    """
    package = logging.getLogger("fcl_bench")
    package.setLevel(logging.DEBUG)  # run.log has it all
    for old in [handler for handler in package.handlers if handler.name == _TERMINAL]:
        package.removeHandler(old)
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    handlers[0].setLevel(logging.WARNING)
    if notes:
        handlers.append(logging.StreamHandler(sys.stdout))
        handlers[1].setLevel(logging.INFO)
        handlers[1].addFilter(lambda record: record.levelno < logging.WARNING)
    if kept is not None:
        handlers.append(_Kept(kept))
    for handler in handlers:
        handler.name = _TERMINAL
        handler.setFormatter(_Printable(f"{prefix}: %(message)s"))
        package.addHandler(handler)
    # Warnings of libraries get lines of the same form.
    warnings.showwarning = _folded
    logging.lastResort = logging.StreamHandler(sys.stderr)
    logging.lastResort.setLevel(logging.WARNING)
    logging.lastResort.setFormatter(_OneLine(f"{prefix}: %(name)s: %(message)s"))


def _folded(message: Warning | str, *_: Any, **__: Any) -> None:
    """Log a library's warning (such as Pillow's on damaged metadata) as one of ours, without its source line."""
    log.warning("%s", " ".join(str(message).split()))


class _Kept(logging.Handler):
    """Adds the text of each warning to a list, once."""

    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        text = printable(" ".join(record.getMessage().split()))
        if text not in self._kept:
            self._kept.append(text)


class _Printable(logging.Formatter):
    """Escapes control characters in names of files and other data, so that a terminal does not obey them."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _OneLine(_Printable):
    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).split())


class Notices:
    """Logs each kind of notice once (terminal and run.log), since many clients or tasks may repeat it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: set[str] = set()

    def tell(self, kind: str, text: str, level: int = logging.WARNING) -> None:
        """Log `text`, unless a notice of this `kind` was logged before."""
        if kind not in self._told:
            self._told.add(kind)
            self._log.log(level, text)


def silence() -> None:
    """Switch off all output of the package and libraries' warnings, since another process prints for this one."""
    package = logging.getLogger("fcl_bench")
    package.addHandler(logging.NullHandler())
    package.propagate = False
    warnings.simplefilter("ignore")
    _quiet.append(True)


#: Not empty once all output is switched off.
_quiet: list[bool] = []


def progress(total: int, what: str, unit: str, done: int = 0) -> Progress:
    """A bar with rate and time left on stderr, shown only after two seconds.

    If stderr is not a terminal, there is one line per minute instead.

    Args:
        total: the number of units of work.
        what: the text before the bar.
        unit: what is counted ("image"); bytes ("B") are shown in millions and the like.
        done: units that an earlier, interrupted pass already did (not counted in the rate).
    """
    if not _quiet and not sys.stderr.isatty():
        return ProgressLines(total, what, unit, done)
    # Imported here, so that `--help` does not wait for it.
    from tqdm import tqdm

    return tqdm(
        total=total,
        disable=bool(_quiet),
        desc=what,
        unit=f" {unit}",
        unit_scale=unit == "B",
        initial=done,
        delay=2,
        mininterval=0.1,
        dynamic_ncols=True,
        leave=False,
    )
