"""Space: which client holds which samples of a task, which are labelled, and the rules without a Dirichlet law."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.sources.base import Split, rank_in_group
from fcl_bench.errors import UserError
from fcl_bench.randomness import generator


class Partition(ABC):
    """What `partition=...` names: a rule that assigns one task's samples to K clients."""

    name: ClassVar[str]
    #: Whether tasks with the same numbers of samples get the same draw.
    repeats: ClassVar[bool] = False

    def generator(self, seed: int, task: int) -> Any:
        """What a task's draws come from: a NumPy generator, given the run's seed."""
        return generator(seed, "partition", task)

    def redraws(self, sizes: np.ndarray, clients: int, draws: int, rng: np.random.Generator) -> np.ndarray | None:
        """Samples (D, C, K) of each class at each client in other draws of this rule; None: it draws no shares.

        Args:
            sizes: (C,) samples of each class of a task.
            clients: K.
            draws: how many are asked for; D may be less.
        """
        return None

    def groups(self, train: Split, columns: np.ndarray) -> np.ndarray:
        """(n,) what the rule goes by, the `labels` of `holdings`: the training samples' classes `columns` (n,)."""
        return columns

    @abstractmethod
    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        """The client (n,) int64, 0 to K - 1, of each of the task's samples.

        Args:
            labels: (n,) the samples' classes.
            clients: K.
        """

    def holdings(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Holdings:
        """K disjoint, ascending index arrays that cover 0..n-1 exactly."""
        return Holdings.by_owner(self.assign(labels, clients, rng), clients)

    def deal(self, labels: Sequence[np.ndarray], clients: Sequence[int], seed: int) -> list[Holdings]:
        """The holdings of each task, given the `labels` of its samples and how many clients share them."""
        tasks = enumerate(zip(labels, clients, strict=True))
        return [self.holdings(own, number, self.generator(seed, task)) for task, (own, number) in tasks]


@dataclass
class Iid(Partition):
    """Shuffle, then equal shares (they differ by one sample at most)."""

    name: ClassVar[str] = "iid"

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        return rng.permutation(np.arange(len(labels)) % clients)


@dataclass
class Shards(Partition):
    """Sort by class, cut into K * shards equal pieces, give `shards` of them to each client (McMahan et al. 2017)."""

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


@dataclass
class Given(Partition):
    """The clients that the data set's own file names."""

    name: ClassVar[str] = "given"

    def groups(self, train: Split, columns: np.ndarray) -> np.ndarray:
        if train.clients is None:
            raise UserError("partition=given: the data set names no clients", "a file with a column client")
        return train.clients

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        if (last := int(labels.max())) >= clients:
            raise UserError(f"clients={clients}: the data set names more", f"clients={last + 1} at least")
        return labels


class Holdings(Sequence[np.ndarray]):
    """The clients' samples of one task: a sequence of K index arrays, each a view of one array.

    One array per client and task would be ten million objects with 10,000 clients and 1,000 tasks, most of them empty;
    this class stores n numbers and K + 1 ends.

    Attributes:
        indices: (n,) int64, the samples of client 0, then those of client 1, and so on.
        ends: (K + 1,) int64; client k holds `indices[ends[k]:ends[k + 1]]`.
    """

    def __init__(self, indices: np.ndarray, ends: np.ndarray) -> None:
        self.indices = indices
        self.ends = ends

    @classmethod
    def by_owner(cls, owner: np.ndarray, clients: int) -> Holdings:
        """Holdings in which sample i is that of client `owner[i]`."""
        return cls(np.argsort(owner, kind="stable"), np.cumsum([0, *np.bincount(owner, minlength=clients)]))

    @classmethod
    def of(cls, clients: Iterable[np.ndarray]) -> Holdings:
        """Holdings from one index array per client; an argument that is already a `Holdings` is returned unchanged."""
        if isinstance(clients, Holdings):
            return clients
        parts = [np.asarray(indices, dtype=np.int64) for indices in clients]
        ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return cls(np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64), ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, client: int) -> np.ndarray:  # type: ignore[override]  # nobody needs slices
        chosen = range(len(self))[client]
        return self.indices[self.ends[chosen] : self.ends[chosen + 1]]

    def sizes(self) -> np.ndarray:
        """(K,) samples of each client."""
        return np.diff(self.ends)

    def chosen(self, among: np.ndarray) -> np.ndarray:
        """(K,) how many of each client's samples are chosen, given (N,) bool over the data set."""
        before = np.concatenate([[0], np.cumsum(among[self.indices], dtype=np.int64)])
        return before[self.ends[1:]] - before[self.ends[:-1]]


def draw_labelled(labels: np.ndarray, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Which samples (n,) are labelled: the share `rate`, rounded to the nearest number and stratified by class.

    Every class retains floor(rate * n_c) of its labels at random; the rest of the budget goes to the classes with the
    largest remainders. A client with very few samples may retain none.
    """
    order = rng.permutation(len(labels))
    _, members, sizes = np.unique(labels[order], return_inverse=True, return_counts=True)
    quota = np.floor(rate * sizes + 1e-9).astype(np.int64)
    missing = int(np.floor(rate * len(labels) + 0.5)) - int(quota.sum())
    # Ties between remainders go to the class that comes first in the random order, not to the lowest label.
    first = np.unique(members, return_index=True)[1]
    by_remainder = np.lexsort((first, -(rate * sizes - quota)))
    quota[by_remainder[: max(missing, 0)]] += 1
    labelled = np.zeros(len(labels), dtype=bool)
    labelled[order] = rank_in_group(members) < quota[members]
    return labelled
