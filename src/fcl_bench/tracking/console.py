"""What appears on the terminal: lines that outlive their reader, progress bars, notices that are told once."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcl_bench.errors import printable

if TYPE_CHECKING:
    from tqdm import tqdm

log = logging.getLogger(__name__)

#: Name of the log handlers that write to the terminal.
_TERMINAL = "terminal"


def say(text: str) -> None:
    """Print a line now, or go on without a reader (`| head`)."""
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """The reader of our output has gone: go on without it, a sweep has more runs to do."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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


def log_to_terminal(prefix: str, notes: bool = True) -> None:
    """Send the package's warnings to stderr and its notes to stdout, in place of what an earlier call arranged.

    Args:
        prefix: what stands before each line: the command's name.
        notes: whether notes are shown at all.
    """
    package = logging.getLogger("fcl_bench")
    package.setLevel(logging.DEBUG)  # run.log has it all
    for old in [handler for handler in package.handlers if handler.name == _TERMINAL]:
        package.removeHandler(old)
    handlers = [logging.StreamHandler(sys.stderr)]
    handlers[0].setLevel(logging.WARNING)
    if notes:
        handlers.append(logging.StreamHandler(sys.stdout))
        handlers[1].setLevel(logging.INFO)
        handlers[1].addFilter(lambda record: record.levelno < logging.WARNING)
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


def progress(total: int, what: str, unit: str, done: int = 0) -> tqdm:
    """A bar with rate and time left on stderr, shown only once two seconds have passed.

    On a terminal it moves; in a log file it adds a line's worth every 30 seconds.

    Args:
        total: units of work in all.
        what: the text before the bar.
        unit: what is counted ("image"); of bytes ("B") in millions and the like.
        done: units that an earlier, interrupted pass already did (not counted in the rate).
    """
    # Here, so that `--help` does not wait for it.
    from tqdm import tqdm

    live = sys.stderr.isatty()
    return tqdm(
        total=total,
        disable=bool(_quiet),
        desc=what,
        unit=f" {unit}",
        unit_scale=unit == "B",
        initial=done,
        delay=2,
        mininterval=0.1 if live else 30,
        dynamic_ncols=live,
        leave=not live,
    )
