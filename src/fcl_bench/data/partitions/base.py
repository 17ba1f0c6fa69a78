"""Space: which client holds which samples of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from fcl_bench.data.groups import parts


class Partition(ABC):
    """What `partition=...` names: a rule that deals one task's samples out to K clients."""

    name: ClassVar[str]

    @abstractmethod
    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        """The client (0..K-1) of each of the task's samples.

        Args:
            labels: (n,) the samples' classes.
            clients: K.
            rng: this task's own generator.

        Returns:
            (n,) int64. Disjointness and cover hold by construction: each sample has exactly one client.
        """

    def deal(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """K disjoint, ascending index arrays that cover 0..n-1 exactly."""
        return parts(self.assign(labels, clients, rng), clients)
