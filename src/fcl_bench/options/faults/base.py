"""What becomes of each client that is asked for an upload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import numpy as np

from fcl_bench.config import knob


class Fate(Enum):
    """What becomes of a client that a round asks for an upload."""

    ANSWERS = "answers"
    SILENT = "silent"  # it does nothing this time
    LATE = "late"  # it does its work, and the upload arrives in a later round
    GONE = "gone"  # it has left for good


@dataclass
class Faults(ABC):
    """Clients that fail.

    Args:
        late_by: after how many rounds, or tasks, a late upload arrives.
        late_unit: "round": rounds of the whole run, so that with one round per task it arrives in the next task;
            "task": at the start of the later task.
        min_clients: the least number of answers in a round; silent clients are asked again until it is reached.
    """

    name: ClassVar[str]
    fails: ClassVar[bool] = True
    #: How often silent clients are asked again before the run gives up.
    attempts: ClassVar[int] = 20

    late_by: int = knob(1, least=1)
    late_unit: str = knob("round", choices=("round", "task"))
    min_clients: int = knob(1, least=0)

    def check(self, clients: int, tasks: int) -> None:  # noqa: B027
        """Raise a `UserError` for knobs that K clients or T tasks rule out, before any work is done."""

    @abstractmethod
    def fates(self, seed: int, clients: int, task: int, round_: int, attempt: int) -> np.ndarray:
        """(K,) what becomes of each client when it is asked, `Fate` objects.

        Args:
            seed: of the run.
            clients: K.
            task, round_: at hand.
            attempt: how often the round has been asked before; 0: the first time.
        """
