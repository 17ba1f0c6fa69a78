"""What a decoder that is fuzzed has to say of itself, and what counts as trouble."""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.faults.scenarios import fresh
from fcl_bench.errors import UserError


class Target(ABC):
    """A decoder.

    Attributes:
        share: of a million inputs.
        refusals: what it may raise; the message has to be one printable line.
    """

    name: ClassVar[str]
    share: ClassVar[int]
    #: Bytes that a process of inputs may take beyond its own.
    room: ClassVar[int] = 512 << 20
    refusals: ClassVar[tuple[type[Exception], ...]] = (UserError,)

    def __init__(self, scratch: Path) -> None:
        self.scratch = fresh(scratch / self.name.replace(" ", "-"))
        self.scratch.mkdir(parents=True)

    @abstractmethod
    def drawn(self, rng: random.Random) -> Any:
        """One malformed input."""

    @abstractmethod
    def read(self, given: Any) -> object:
        """Read it as the program does."""


def trouble_of(target: Target, given: Any) -> str:
    """What is wrong with how an input is read; "": it is read, or refused in one printable line."""
    try:
        target.read(given)
    except target.refusals as error:
        told = str(error)
        return "" if told.isprintable() and len(told) < 4500 else f"a message that is no line: {told[:200]!r}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]!r}"
    return ""


def quietly(work: Callable[[], int]) -> int:
    """Do `work` while nothing is logged, as what is damaged is told of in warnings."""
    logging.disable(logging.CRITICAL)
    try:
        return work()
    finally:
        logging.disable(logging.NOTSET)
