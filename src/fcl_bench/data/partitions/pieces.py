"""Space: equal pieces of a shuffled task, or of one that is sorted by class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.partitions.base import Partition


@dataclass
class Iid(Partition):
    """Shuffle, then equal shares (they differ by one sample at most)."""

    name: ClassVar[str] = "iid"

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        return rng.permutation(np.arange(len(labels)) % clients)


@dataclass
class Shards(Partition):
    """Sort by class, cut into K * shards equal pieces, deal `shards` of them to each client (McMahan et al. 2017).

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
