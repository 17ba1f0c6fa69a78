"""A second process that draws a run's pictures: it imports Matplotlib while the run's own imports torch."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, cast

import numpy as np

from fcl_bench.environment import available_cores
from fcl_bench.runs.pictures.pictures import Pictures, drawn

#: By the caller's own path, since Python would put the working folder, and any `random.py` in it, before the libraries.
_CODE = "import sys; sys.path[:] = {path!r}; from fcl_bench.runs.pictures.drawing_process import serve; serve()"


#: Drawn for nobody while there is nothing to draw: it has Matplotlib imported, and fonts read.
_FIRST = Pictures("", [0.0, 1.0], np.tri(2), [1, 2])


@contextmanager
def drawing_beside() -> Iterator[Callable[[Pictures], dict[str, bytes]]]:
    """What draws a run's pictures in this block, once: `pictures.drawn`, in a process of its own where that saves time.

    It takes 0.3 to 0.5 s off a run. Nothing that a run measures shares the cores with it: it is ready in half the time
    that torch takes to be imported, and then waits.
    """
    if not _pays():
        yield drawn
        return
    try:
        # A session of its own: Ctrl-C is for the run. The process ends with the run, however that comes.
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError:
        yield drawn
        return
    with process:
        try:
            yield lambda pictures: _answer(process, pictures)
        finally:
            process.kill()


def _pays() -> bool:
    """Whether a core is free for it, and Matplotlib still to be imported."""
    return available_cores() > 1 and "matplotlib" not in sys.modules


def _answer(process: subprocess.Popen[bytes], pictures: Pictures) -> dict[str, bytes]:
    asked, answer = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    try:
        with asked:
            pickle.dump(pictures, asked)
        return cast(dict[str, bytes], pickle.load(answer))
    except (OSError, EOFError, pickle.UnpicklingError):
        # It failed, or somebody ended it. Whatever is wrong with the pictures comes up again here.
        return drawn(pictures)


def serve() -> None:
    """Draw the pictures that come through standard input, and write the files to standard output."""
    drawn(_FIRST)
    if asked := sys.stdin.buffer.read():
        pickle.dump(drawn(pickle.loads(asked)), sys.stdout.buffer)
        sys.stdout.flush()
