"""Python's garbage collector at start-up: it looks through every imported module again and again, and finds nothing."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def resting_collector() -> Iterator[None]:
    """No garbage collection in this block, which should do little but import.

    Importing torch, Hydra and Matplotlib makes a million objects that all stay, and took a sixth longer with it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@functools.cache
def set_imports_aside() -> None:
    """Have no later collection look through what there is now: the imports, for which it is called after them.

    Python's last collection, at exit, took a quarter of the time of `import torch`; the system takes the memory back
    anyway. Only the first call does something, since a later one would keep whatever garbage a job has left for good.
    """
    gc.freeze()
