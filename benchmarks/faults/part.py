"""One part of the campaign: its cases and their results."""

from __future__ import annotations

import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar


class Part(ABC):
    """A kind of fault.

    Args:
        scratch: an empty folder of its own.
        seed: of whatever is drawn.

    Attributes:
        name: of the part on the command line.
        quick, full: how many cases are tried by default in either size.
    """

    name: ClassVar[str]
    quick: ClassVar[int]
    full: ClassVar[int]

    def __init__(self, scratch: Path, seed: int = 0) -> None:
        self.scratch, self.seed = scratch, seed

    @abstractmethod
    def cases(self, most: int) -> Sequence[str]:
        """Names of cases, at least `most` if there are so many; the runner picks `most` of them evenly."""

    @abstractmethod
    def tried(self, case: str) -> str:
        """Try one case; returns "" if the requirements held, else what went wrong."""

    def count(self, case: str) -> str:
        """What the case that was just tried is counted as, for the summary; "" for nothing in particular."""
        return ""


@dataclass
class Result:
    """The result of a part."""

    part: str
    tried: int = 0
    seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)

    def line(self) -> str:
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(self.kinds.items()))
        return (
            f"{self.part}: {self.tried} tried, {self.tried - len(self.failed)} held, {len(self.failed)} failed"
            f"{f' ({kinds})' if kinds else ''}, {self.seconds:.0f} s"
        )


def evenly(cases: Sequence[str], most: int) -> list[str]:
    """`most` of the cases, spread over all of them; all if there are no more, or `most` is 0."""
    if not most or len(cases) <= most:
        return list(cases)
    return [cases[index * len(cases) // most] for index in range(most)]


def carried_out(part: Part, most: int, only: str = "", minutes: float = math.inf) -> Result:
    """Try the part's cases; each failure is printed at once, with the command that repeats it.

    Args:
        most: cases; 0 for all.
        only: this case.
        minutes: after which no other case is begun; the cases come in random order, so that any number covers all.
    """
    result, begin = Result(part.name), time.perf_counter()
    cases = [only] if only else evenly(part.cases(most), most)
    draw(part.seed, "order").shuffle(cases)
    for case in cases:
        if time.perf_counter() - begin > 60 * minutes:
            break
        trouble = part.tried(case)
        result.tried += 1
        if kind := part.count(case):
            result.kinds[kind] = result.kinds.get(kind, 0) + 1
        if trouble:
            result.failed[case] = trouble
            print(f"failed: {case}: {trouble}")
            print(f"  python -m benchmarks.faults {part.name} --seed {part.seed} --only {case!r}", flush=True)
    result.seconds = time.perf_counter() - begin
    return result


def draw(seed: int, *names: object) -> random.Random:
    """A generator of its own for each case."""
    return random.Random(":".join(map(str, (seed, *names))))
