"""Printing that goes on when whoever read it has gone (`| head`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def say(text: str) -> None:
    """Print a line now, or go on without a reader."""
    try:
        print(text, flush=True)
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
