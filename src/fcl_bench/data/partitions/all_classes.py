"""Space: a Dirichlet partition in which every client holds every class of the task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.special import softmax

from fcl_bench.data.partitions.dirichlet import DirichletPartition, log_dirichlet, owners
from fcl_bench.errors import UserError


@dataclass
class DirichletAllClasses(DirichletPartition):
    """Label skew by a Dirichlet law, every class at every client: FedProTIP's text (Appendix E.4).

    Class by class, shares p ~ Dir(beta, ..., beta) over the clients; client k gets p_k n_c of the class's n_c samples,
    rounded down or up with p_k n_c as its mean. "We prevent empty assignments": a client that comes out with none then
    gets one sample, at random from those that the others can spare, which is all but one of each. There is no cap, so
    clients differ in size.

    Raises (in `assign`):
        UserError: a class has fewer samples than there are clients.
    """

    name: ClassVar[str] = "dirichlet_all_classes"

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        sizes = np.unique(labels, return_counts=True)[1]
        if len(sizes) and sizes.min() < clients:
            raise UserError(
                f"partition={self.name} gives each of clients={clients} a sample of every class, and the smallest class"
                f" of a task has {sizes.min()}",
                f"clients={sizes.min()} at most, or partition=dirichlet",
            )
        counts = _rounded(softmax(log_dirichlet(self.beta, len(sizes), clients, rng), axis=1), sizes, rng)
        for of_class in counts:
            _fill(of_class, rng)
        return owners(labels, counts, rng)


def _rounded(shares: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Integers next to shares * sizes (C, K) that add up to `sizes` (C,) over each row, and are right in the mean.

    One random shift moves all cuts of a row. Without it the cuts at the floor of the running sum, as public code has
    them, would cost the first client half a sample of every class and give it to the last.
    """
    edges = np.floor(np.cumsum(shares, axis=1) * sizes[:, None] + rng.random((len(sizes), 1))).astype(np.int64)
    # The last cut is the end of the class, and none is behind it, whatever rounding says.
    edges = np.minimum(edges, sizes[:, None])
    edges[:, -1] = sizes
    return np.diff(edges, axis=1, prepend=0)


def _fill(counts: np.ndarray, rng: np.random.Generator) -> None:
    """Give each client that has none of a class one sample of those that others can spare; `counts` (K,), in place."""
    empty = counts == 0
    counts -= rng.multivariate_hypergeometric(np.maximum(counts - 1, 0), int(empty.sum()))
    counts[empty] = 1
