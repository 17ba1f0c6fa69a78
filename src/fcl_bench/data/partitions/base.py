"""Space: which client holds which samples of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fcl_bench.errors import UserError, require_count


class Partition(ABC):
    """What `partition=...` names: a rule that deals one task's samples out to K clients.

    Attributes:
        uses_beta: whether the rule depends on `beta`.
    """

    name: ClassVar[str]
    uses_beta: ClassVar[bool] = False

    @abstractmethod
    def assign(self, labels: np.ndarray, clients: int, beta: float, rng: np.random.Generator) -> np.ndarray:
        """The client (0..K-1) of each of the task's samples.

        Args:
            labels: (n,) the samples' classes.
            clients: K.
            beta: concentration of the Dirichlet law, for the rules that use it.
            rng: this task's own generator.

        Returns:
            (n,) int64. Disjointness and cover hold by construction: each sample has exactly one client.
        """

    def deal(self, labels: np.ndarray, clients: int, beta: float, rng: np.random.Generator) -> list[np.ndarray]:
        """K disjoint, ascending index arrays that cover 0..n-1 exactly."""
        owner = self.assign(labels, clients, beta, rng)
        counts = np.bincount(owner, minlength=clients)
        return np.split(np.argsort(owner, kind="stable"), np.cumsum(counts)[:-1])


@dataclass
class Iid(Partition):
    """Shuffle, then equal shares (they differ by one sample at most)."""

    name: ClassVar[str] = "iid"

    def assign(self, labels: np.ndarray, clients: int, beta: float, rng: np.random.Generator) -> np.ndarray:
        return rng.permutation(np.arange(len(labels)) % clients)


@dataclass
class Shards(Partition):
    """Sort by class, cut into K * shards equal pieces, deal `shards` of them to each client (McMahan et al. 2017).

    Args:
        shards: pieces per client (AFL's s).
    """

    name: ClassVar[str] = "shards"
    shards: int = 2

    def __post_init__(self) -> None:
        require_count("partition.shards", self.shards)

    def assign(self, labels: np.ndarray, clients: int, beta: float, rng: np.random.Generator) -> np.ndarray:
        pieces = clients * self.shards
        # A random order within each class, so that a cut through a class is a random one.
        order = np.lexsort((rng.random(len(labels)), labels))
        owner_of_piece = rng.permutation(np.arange(pieces) % clients)
        owner = np.empty(len(labels), dtype=np.int64)
        owner[order] = owner_of_piece[np.arange(len(labels)) * pieces // max(len(labels), 1)]
        return owner


@dataclass
class Dirichlet(Partition):
    """Label skew by a Dirichlet law, balanced by a cap, as the public code of the papers does it.

    Class by class, shares p ~ Dir(beta, ..., beta) over the clients; a client that already holds n / K samples or more
    gets none of this class. The whole draw is repeated until every client holds `min_size` samples.

    Args:
        min_size: fewest samples of a task at a client; 0 lets clients be empty.
        retries: draws before giving up with an error.
    """

    name: ClassVar[str] = "dirichlet"
    uses_beta: ClassVar[bool] = True
    min_size: int = 1
    retries: int = 1000

    def __post_init__(self) -> None:
        require_count("partition.min_size", self.min_size, least=0)
        require_count("partition.retries", self.retries)

    def assign(self, labels: np.ndarray, clients: int, beta: float, rng: np.random.Generator) -> np.ndarray:
        if self.min_size * clients > len(labels):
            raise UserError(
                f"partition.min_size={self.min_size} for clients={clients} asks for {self.min_size * clients} samples"
                f" and a task has {len(labels)}",
                f"partition.min_size={len(labels) // clients} at most, or fewer clients or tasks",
            )
        by_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(np.unique(labels, return_counts=True)[1])[:-1])
        fullest = 0
        for _ in range(self.retries):
            owner = self._draw(by_class, clients, beta, rng)
            smallest = int(np.bincount(owner, minlength=clients).min())
            if smallest >= self.min_size:
                return owner
            fullest = max(fullest, smallest)
        raise UserError(
            f"partition.min_size={self.min_size} was not met in {self.retries} draws with clients={clients},"
            f" beta={beta:g} (best smallest client: {fullest})",
            f"partition.min_size={fullest}, a larger beta, or fewer clients or tasks",
        )

    @staticmethod
    def _draw(by_class: list[np.ndarray], clients: int, beta: float, rng: np.random.Generator) -> np.ndarray:
        owner = np.empty(sum(map(len, by_class)), dtype=np.int64)
        held = np.zeros(clients, dtype=np.int64)
        cap = len(owner) / clients
        for indices in by_class:
            members = rng.permutation(indices)
            shares = rng.dirichlet(np.full(clients, beta)) * (held < cap)
            if shares.sum() == 0:
                # A small beta can put all of its mass on full clients; the public code divides by zero here. At least
                # one client is below the cap, since fewer than n samples are dealt.
                shares = (held < cap).astype(float)
            ends = (np.cumsum(shares / shares.sum()) * len(members)).astype(np.int64)
            # The last cut is the end of the class whatever rounding says, but never at a client that is full.
            ends[np.flatnonzero(shares)[-1] :] = len(members)
            counts = np.diff(ends, prepend=0)
            owner[members] = np.repeat(np.arange(clients), counts)
            held += counts
        return owner
