"""The interface between a side of a row and the process that measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from benchmarks.peers.settings import Row


class Work(NamedTuple):
    """Everything is set up and nothing learnt.

    Attributes:
        run: what is timed; once.
        result: after it, what was learnt as one vector, to be compared between sides.
    """

    run: Callable[[], object]
    result: Callable[[], torch.Tensor]


class Adapter(Protocol):
    """A module of this folder that makes a side's work."""

    def prepared(self, row: Row, checkout: Path) -> Work:
        """New work: built, not timed. `checkout` is where the public code lies."""
        ...


def flat(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """All of them as one vector in float64."""
    return torch.cat([value.detach().double().flatten() for value in parameters])
