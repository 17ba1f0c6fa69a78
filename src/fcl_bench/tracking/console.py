"""What appears on the terminal: lines that outlive their reader, progress bars, notices that are told once."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from fcl_bench.errors import printable
from fcl_bench.tracking.progress import Progress, ProgressLines

log = logging.getLogger(__name__)

#: Name of the log handlers that write to the terminal.
_TERMINAL = "terminal"


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line now, to stdout or another stream, or go on without a reader (`| head`)."""
    try:
        print(printable(text), file=stream, flush=True)
    except BrokenPipeError:
        drop_output(stream)


def drop_output(stream: TextIO | None = None) -> None:
    """The reader of stdout, or of another stream, has gone: go on without it, a sweep has more runs to do."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


@contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """What Python prints and logs in this block, on either stream, is added to the file `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", buffering=1, errors="backslashreplace") as file, redirect_stdout(file), redirect_stderr(file):
        yield


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """What this process prints in the block, on either stream and from any library, is added to the file `path`."""
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
    """Send the package's warnings to stderr and its notes to stdout, in place of what an earlier call arranged.

    Args:
        prefix: what stands before each line: the command's name.
        kept: where each warning's text is put besides, once.
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
    # What libraries have to say comes in lines of the same form.
    warnings.showwarning = _folded
    logging.lastResort = logging.StreamHandler(sys.stderr)
    logging.lastResort.setLevel(logging.WARNING)
    logging.lastResort.setFormatter(_OneLine(f"{prefix}: %(name)s: %(message)s"))


def _folded(message: Warning | str, *_: Any, **__: Any) -> None:
    """A library's warning (of Pillow on damaged metadata, say) as one of ours, without the code that it comes from."""
    log.warning("%s", " ".join(str(message).split()))


class _Kept(logging.Handler):
    """Puts the text of each warning into a list, once."""

    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        text = printable(" ".join(record.getMessage().split()))
        if text not in self._kept:
            self._kept.append(text)


class _Printable(logging.Formatter):
    """Names of files and the like are data: what a terminal would obey is written out."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _OneLine(_Printable):
    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).split())


class Notices:
    """Tells each kind of notice once, through the log (terminal and run.log), where many clients or tasks repeat it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: set[str] = set()

    def tell(self, kind: str, text: str, level: int = logging.WARNING) -> None:
        """Log `text`, unless something of this `kind` has been told already."""
        if kind not in self._told:
            self._told.add(kind)
            self._log.log(level, text)


def silence() -> None:
    """Nothing more is said by the package or by libraries' warnings: another process speaks for this one."""
    package = logging.getLogger("fcl_bench")
    package.addHandler(logging.NullHandler())
    package.propagate = False
    warnings.simplefilter("ignore")
    _quiet.append(True)


#: Holds something once nothing is to be said any more.
_quiet: list[bool] = []


def progress(total: int, what: str, unit: str, done: int = 0) -> Progress:
    """A bar with rate and time left on stderr, shown only once two seconds have passed.

    Where stderr is no terminal, a line a minute instead.

    Args:
        total: units of work in all.
        what: the text before the bar.
        unit: what is counted ("image"); of bytes ("B") in millions and the like.
        done: units that an earlier, interrupted pass already did (not counted in the rate).
    """
    if not _quiet and not sys.stderr.isatty():
        return ProgressLines(total, what, unit, done)
    # Here, so that `--help` does not wait for it.
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
