"""Faults by probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fcl_bench.config import knob
from fcl_bench.errors import UserError
from fcl_bench.options.faults.base import Fate, Faults
from fcl_bench.randomness import generator


def _probability(default: float) -> Any:
    return knob(default, least=0, most=1, words="a probability, 0 to 1")


@dataclass
class RandomFaults(Faults):
    """Each client draws its own fate in each round, from the run's seed.

    Args:
        silent: probability that a client does not answer a round.
        late: probability that its upload of a round comes late.
        gone: probability that a client leaves for good at the start of a task.
    """

    name: ClassVar[str] = "random"

    silent: float = _probability(0.1)
    late: float = _probability(0.0)
    gone: float = _probability(0.0)

    def __post_init__(self) -> None:
        if self.silent + self.late > 1:
            raise UserError(
                f"faults.silent={self.silent:g} and faults.late={self.late:g} add up to more than 1",
                "probabilities that add up to 1 or less",
            )

    def fates(self, seed: int, clients: int, task: int, round_: int, attempt: int) -> np.ndarray:
        draw = generator(seed, "faults", task, round_, attempt).random(clients)
        found = np.full(clients, Fate.ANSWERS, dtype=object)
        found[draw < self.silent + self.late] = Fate.LATE
        found[draw < self.silent] = Fate.SILENT
        if self.gone:
            # The number of tasks up to the one at whose start a client leaves, that one included.
            found[generator(seed, "faults: gone").geometric(self.gone, clients) <= task + 1] = Fate.GONE
        return found
