"""Space: clients of very different size, each with a preference of its own over the whole stream's classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.special import softmax

from fcl_bench.config import knob
from fcl_bench.data.partitions.base import Holdings
from fcl_bench.data.partitions.dirichlet import DirichletPartition, log_dirichlet, owners
from fcl_bench.errors import UserError


@dataclass
class DirichletPowerLaw(DirichletPartition):
    """The partition of FedSpace's public code, drawn once for all tasks.

    Client k's size is proportional to a draw of the density power x^(power - 1) on 0 to 1. Client after client then
    draws a preference q_k ~ Dir(beta, ..., beta) over the classes that have samples left, and takes q_kc times its size
    of class c, or what is there. In the end clients that are not full get what is left, both in their order.

    A client has few samples or none of many tasks, since the draw is of all of them.
    """

    name: ClassVar[str] = "dirichlet_power_law"
    power: float = knob(3.0, above=0)

    def deal(self, labels: Sequence[np.ndarray], clients: Sequence[int], seed: int) -> list[Holdings]:
        if len(set(clients)) > 1:
            raise UserError(f"partition={self.name} deals out all tasks at once, to all clients", "split.missing=0")
        owner = self.assign(np.concatenate(labels), clients[0], self.generator(seed, 0))
        cuts = np.cumsum([len(own) for own in labels])[:-1]
        return [Holdings.by_owner(own, clients[0]) for own in np.split(owner, cuts)]

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        left = np.unique(labels, return_counts=True)[1]
        sizes = self._sizes(len(labels), clients, rng)
        preferences = log_dirichlet(self.beta, clients, len(left), rng)
        counts = np.zeros((len(left), clients), dtype=np.int64)
        for client in np.flatnonzero(sizes):
            there = np.flatnonzero(left)
            wanted = np.rint(softmax(preferences[client, there]) * sizes[client]).astype(np.int64)
            # Rounded numbers may have a sum above the client's size.
            taken = np.diff(np.minimum(np.cumsum(np.minimum(wanted, left[there])), sizes[client]), prepend=0)
            counts[there, client] = taken
            left[there] -= taken
        return owners(labels, counts + _filled(left, sizes - counts.sum(axis=0)), rng)

    def _sizes(self, samples: int, clients: int, rng: np.random.Generator) -> np.ndarray:
        """How many samples each client gets (K,); together all of them."""
        shares = rng.power(self.power, clients)
        # The running sum is rounded and not the shares, so that no sample is left over.
        ends = np.rint(np.cumsum(shares) / shares.sum() * samples).astype(np.int64)
        return np.diff(ends, prepend=0)


def _filled(left: np.ndarray, places: np.ndarray) -> np.ndarray:
    """What of each class's samples `left` (C,) goes to clients with so many `places` (K,), both in order: (C, K)."""
    rows, columns = np.cumsum(left), np.cumsum(places)
    ends = np.minimum(rows[:, None], columns)
    begins = np.maximum((rows - left)[:, None], columns - places)
    return np.maximum(ends - begins, 0)
