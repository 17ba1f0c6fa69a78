"""Lines on the terminal that survive the loss of their reader."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from fcl_bench.errors import printable


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
