"""Space: which client holds which samples of a task; and the rules that need no Dirichlet law."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.partitions.holdings import Holdings


class Partition(ABC):
    """What `partition=...` names: a rule that assigns one task's samples to K clients."""

    name: ClassVar[str]

    @abstractmethod
    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        """The client (n,) int64, 0 to K - 1, of each of the task's samples.

        Args:
            labels: (n,) the samples' classes.
            clients: K.
            rng: this task's own generator.
        """

    def holdings(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Holdings:
        """K disjoint, ascending index arrays that cover 0..n-1 exactly."""
        owner = self.assign(labels, clients, rng)
        ends = np.cumsum([0, *np.bincount(owner, minlength=clients)])
        return Holdings(np.argsort(owner, kind="stable"), ends)


@dataclass
class Iid(Partition):
    """Shuffle, then equal shares (they differ by one sample at most)."""

    name: ClassVar[str] = "iid"

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        return rng.permutation(np.arange(len(labels)) % clients)


@dataclass
class Shards(Partition):
    """Sort by class, cut into K * shards equal pieces, give `shards` of them to each client (McMahan et al. 2017).

    Args:
        shards: pieces per client (AFL's s).
    """

    name: ClassVar[str] = "shards"
    shards: int = knob(2, least=1)

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        pieces = clients * self.shards
        # A random order within each class, so that a cut through a class is a random one.
        order = np.lexsort((rng.random(len(labels)), labels))
        owner_of_piece = rng.permutation(np.arange(pieces) % clients)
        owner = np.empty(len(labels), dtype=np.int64)
        owner[order] = owner_of_piece[np.arange(len(labels)) * pieces // max(len(labels), 1)]
        return owner
