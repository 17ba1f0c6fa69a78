"""The sides of a row in turn, each in a process that waits while the others run."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np

from benchmarks.peers.settings import Row
from benchmarks.peers.sides import OURS, Side

REPOSITORY = Path(__file__).parents[2]


class Failed(Exception):
    """A side's process ended, and why."""


class Child:
    """A process of one side; see `child.py`.

    Args:
        side, checkout: which, and where its code is.
        size, name: of the row in `ROWS`.
        threads: of torch.
    """

    def __init__(self, side: Side, checkout: Path, size: str, name: str, threads: int) -> None:
        self.side = side
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  # closed with the process
        counts = {variable: str(threads) for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        command = [sys.executable, "-m", "benchmarks.peers.child", side.name, size, name, str(checkout.resolve())]
        self._process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **counts},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a line that a process never read is still in the pipe
                pipe.close()
        if error is not None:
            self._process.kill()
        self._process.wait()
        self._log.close()

    def ask(self, line: str) -> dict:
        """Send a line, and wait for the answer. Raises `Failed`."""
        assert self._process.stdin is not None
        try:
            print(line, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure() from None
        return self.answer()

    def answer(self) -> dict:
        """What it says next. Raises `Failed`."""
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if not said:
            raise self._failure()
        return json.loads(said)

    def _failure(self) -> Failed:
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return Failed(f"{self.side.title}: not measured, exit code {code}: {lines[-1] if lines else 'no message'}")


@dataclass
class Measured:
    """One side of a row.

    Attributes:
        seconds: of the processor, one for each alternation.
        bytes: at the peak, above what the process had with everything imported and the row's samples made.
        apart: the distance of its result from ours, as a share of ours' length.
    """

    side: str
    seconds: list[float] = field(default_factory=list)
    bytes: int = 0
    apart: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def ratios(self, ours: Measured) -> list[float]:
        """Our seconds over its own, of each alternation."""
        return [our / own for our, own in zip(ours.seconds, self.seconds, strict=True)]


def measured(
    row: Row,
    size: str,
    name: str,
    sides: list[tuple[Side, Path]],
    repeats: int,
    threads: int,
    tell: Callable[[str], None],
) -> list[Measured]:
    """All sides of a row, ours first, in turn; before that each runs once to warm up.

    Args:
        sides: with where their code is; one that fails is told and left out, unless it is ours.
        tell: takes a line for the user.
    """
    with ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        children = [stack.enter_context(Child(side, at, size, name, threads)) for side, at in sides]
        found = {child.side.name: Measured(child.side.name) for child in children}
        vectors: dict[str, np.ndarray] = {}

        def every(ask: Callable[[Child], None]) -> None:
            for child in list(children):
                try:
                    ask(child)
                except Failed as failure:
                    if child.side is OURS:
                        raise
                    children.remove(child)
                    del found[child.side.name]
                    tell(str(failure))

        def turn(child: Child, counts: bool) -> None:
            told = child.ask("turn")
            own = found[child.side.name]
            own.bytes = max(own.bytes, told["bytes"])
            if counts:
                own.seconds.append(told["seconds"])

        def result(child: Child) -> None:
            file = Path(scratch) / f"{child.side.name}.npy"
            child.ask(f"result {file}")
            vectors[child.side.name] = np.load(file, allow_pickle=False)

        every(Child.answer)
        for repeat in range(repeats + 1):
            every(lambda child, counts=repeat > 0: turn(child, counts))  # type: ignore[misc]
        every(result)
    ours = vectors[OURS.name]
    for own in found.values():
        theirs = vectors[own.side]
        same_shape = theirs.shape == ours.shape
        own.apart = float(np.linalg.norm(theirs - ours) / np.linalg.norm(ours)) if same_shape else float("inf")
    return list(found.values())
