"""Python's garbage collector at start-up: it looks through every imported module again and again, and finds nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class _Start:
    """Of this process: whether its first job has begun."""

    over = False


@contextmanager
def resting_collector() -> Iterator[None]:
    """No garbage collection in this block, which should do little but import.

    Importing torch, Hydra and Matplotlib makes a million objects that all stay, and took a sixth longer with it. Before
    the first job they are set aside, so that no later collection looks through them, the one right after the block and
    the one at exit least of all: each took a quarter of the time of `import torch`. The system takes the memory back
    anyway. During a job and after it this would keep whatever garbage there is for good.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not _Start.over:
            gc.freeze()
        if was_on:
            gc.enable()


def first_job_begins() -> None:
    """From now on nothing is set aside."""
    _Start.over = True
