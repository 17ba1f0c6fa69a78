"""Space: a Dirichlet partition into clients of equal size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.special import softmax

from fcl_bench.data.groups import rank_in_group
from fcl_bench.data.partitions.dirichlet import DirichletPartition, log_dirichlet, owners


@dataclass
class DirichletEqualSizes(DirichletPartition):
    """Label skew by a Dirichlet law at clients of equal size: AFCL's text (Appendix F.1).

    Every client has n / K places (they differ by one at most, and who has one more is random) and a preference
    q_k ~ Dir(beta, ..., beta) over the task's classes. Each place draws a class from its client's preference among the
    classes that still have samples. Where more places draw a class than it has samples, a random choice of them gets
    the samples, and the others draw again, from what is left of their preference, once all others have drawn. All
    places are treated alike, so no client, such as the last, is left with what the others did not want.

    Each round of draws but the last exhausts a class, so there are at most as many rounds as classes.
    """

    name: ClassVar[str] = "dirichlet_equal_sizes"

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        left = np.unique(labels, return_counts=True)[1]
        classes = len(left)
        sizes = len(labels) // clients + (rng.permutation(clients) < len(labels) % clients)
        preferences = log_dirichlet(self.beta, clients, classes, rng)
        # The clients of the open places in the order in which they are served; it is random, once for all rounds.
        places = rng.permutation(np.repeat(np.arange(clients), sizes))
        counts = np.zeros((classes, clients), dtype=np.int64)
        while len(places):
            there = np.flatnonzero(left)
            drawn = there[_draws(softmax(preferences[:, there], axis=1), places, rng)]
            served = rank_in_group(drawn) < left[drawn]
            np.add.at(counts, (drawn[served], places[served]), 1)
            left = left - np.bincount(drawn[served], minlength=classes)
            places = places[~served]
        return owners(labels, counts, rng)


def _draws(shares: np.ndarray, places: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One draw (m,) of 0..C-1 for each of `places` (m,), from the row of `shares` (K, C) that it names."""
    clients, classes = shares.shape
    # One search for all rows: row k's running sums lie between k and k + 1.
    edges = (np.cumsum(shares, axis=1) + np.arange(clients)[:, None]).ravel()
    found = np.searchsorted(edges, places + rng.random(len(places)), side="right") - classes * places
    return np.clip(found, 0, classes - 1)  # a running sum may miss 1 by rounding
