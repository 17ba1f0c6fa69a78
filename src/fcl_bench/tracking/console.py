"""Output on the terminal: lines, log lines, progress, notices that appear once, and what goes to a file instead."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fcl_bench.errors import printable

if TYPE_CHECKING:
    from tqdm import tqdm

log = logging.getLogger(__name__)

#: The name of the log handlers that write to the terminal.
_TERMINAL = "terminal"
#: Seconds between two lines of progress, and before the first one.
_EVERY = 60.0


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line at once, to stdout or another stream; if the reader has gone (`| head`), go on without it."""
    try:
        print(printable(text), file=stream, flush=True)
    except BrokenPipeError:
        drop_output(stream)


def drop_output(stream: TextIO | None = None) -> None:
    """Go on without the reader of stdout or of another stream, which has gone, since a sweep has more runs to do."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, (stream or sys.stdout).fileno())
    os.close(nowhere)


@contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """Append to the file `path` what Python prints and logs in the block, on either stream."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            path.open("a", buffering=1, errors="backslashreplace") as file,
            redirect_stdout(file),
            redirect_stderr(file),
        ):
            yield
    finally:
        log_to_terminal("fcl-bench")


def log_to_terminal(prefix: str, warned: list[str] | None = None, notes: bool = True) -> None:
    """Send the package's warnings to stderr and its notes to stdout; this replaces the effect of an earlier call.

    Args:
        warned: a list to which each warning's text is also added, once.
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
    if warned is not None:
        handlers.append(_Collected(warned))
    for handler in handlers:
        handler.name = _TERMINAL
        handler.setFormatter(_Printable(f"{prefix}: %(message)s"))
        package.addHandler(handler)
    # Warnings of libraries get lines of the same form.
    warnings.showwarning = _log_warning
    logging.lastResort = logging.StreamHandler(sys.stderr)
    logging.lastResort.setLevel(logging.WARNING)
    logging.lastResort.setFormatter(_OneLine(f"{prefix}: %(name)s: %(message)s"))


def _log_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Log a library's warning (such as Pillow's on damaged metadata) as one of ours, without its source line."""
    log.warning("%s", " ".join(str(message).split()))


class _Collected(logging.Handler):
    """Adds the text of each warning to a list, once."""

    def __init__(self, warned: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._warned = warned

    def emit(self, record: logging.LogRecord) -> None:
        text = printable(" ".join(record.getMessage().split()))
        if text not in self._warned:
            self._warned.append(text)


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
        self._logged: set[str] = set()

    def tell(self, kind: str, text: str, level: int = logging.WARNING) -> None:
        """Log `text`, unless a notice of this `kind` was logged before."""
        if kind not in self._logged:
            self._logged.add(kind)
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


def progress(total: int, what: str, unit: str, done: int = 0, at_once: bool = False) -> ProgressLines | tqdm[Any]:
    """A bar with rate and time left on stderr, shown only after two seconds; its `update(n)` tells of n more units.

    If stderr is not a terminal, there is one line per minute instead.

    Args:
        unit: what is counted ("image"); bytes ("B") are shown in millions and the like.
        done: units that an earlier, interrupted pass already did (not counted in the rate).
        at_once: whether the bar, or the first line, is not waited for.
    """
    if not _quiet and not sys.stderr.isatty():
        return ProgressLines(total, what, unit, done, at_once)
    # Imported here, so that `--help` does not wait for it.
    from tqdm import tqdm

    return tqdm(
        total=total,
        disable=bool(_quiet),
        desc=what,
        unit=f" {unit}",
        unit_scale=unit == "B",
        initial=done,
        delay=0 if at_once else 2,
        mininterval=0.1,
        dynamic_ncols=True,
        leave=False,
    )


class ProgressLines:
    """`progress` in a log file: `learning: 31 of 50 rounds, about 40 s left`, once a minute."""

    def __init__(self, total: int, what: str, unit: str, done: int = 0, at_once: bool = False) -> None:
        self._total, self._what, self._unit = total, what, unit
        self._stream = sys.stderr  # of now: that of a sweep's jobs is a file
        self._before = self._done = float(done)
        self._begin = time.monotonic()
        self._printed = self._begin - _EVERY * at_once

    def update(self, n: float | None = 1) -> None:
        self._done += n or 0
        now = time.monotonic()
        if now - self._printed >= _EVERY:
            self._printed = now
            say(self.text(), self._stream)

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
        _IN_PROGRESS.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        _IN_PROGRESS.remove(self)


#: The pieces of work in progress in this process, the innermost last.
_IN_PROGRESS: list[ProgressLines] = []


def current_progress() -> str:
    """The progress that no terminal shows; "" if there is none. It may be called from any thread."""
    return next((work.text() for work in _IN_PROGRESS[-1:]), "")


def duration(seconds: float) -> str:
    """Seconds as `40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
