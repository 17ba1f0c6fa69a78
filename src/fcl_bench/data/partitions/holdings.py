"""The samples of one task that each client holds, as two arrays for any number of clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np


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
    def of(cls, clients: Iterable[np.ndarray]) -> Holdings:
        """Holdings from one index array per client; an argument that is already a `Holdings` is returned unchanged."""
        if isinstance(clients, Holdings):
            return clients
        parts = [np.asarray(indices, dtype=np.int64) for indices in clients]
        ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return cls(np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64), ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    @overload
    def __getitem__(self, client: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, client: slice) -> Sequence[np.ndarray]: ...

    def __getitem__(self, client: int | slice) -> np.ndarray | Sequence[np.ndarray]:
        chosen = range(len(self.ends) - 1)[client]
        if isinstance(chosen, range):
            return [self[k] for k in chosen]
        return self.indices[self.ends[chosen] : self.ends[chosen + 1]]

    def sizes(self) -> np.ndarray:
        """(K,) samples of each client."""
        return np.diff(self.ends)

    def chosen(self, among: np.ndarray) -> np.ndarray:
        """(K,) how many of each client's samples are chosen, given (N,) bool over the data set."""
        before = np.concatenate([[0], np.cumsum(among[self.indices], dtype=np.int64)])
        return before[self.ends[1:]] - before[self.ends[:-1]]
