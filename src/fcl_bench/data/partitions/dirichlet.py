"""Space: a Dirichlet partition balanced by a cap, and what the other two Dirichlet rules share with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.groups import parts
from fcl_bench.data.partitions.base import Partition
from fcl_bench.errors import UserError


@dataclass
class DirichletPartition(Partition):
    """A rule whose shares are drawn from a Dirichlet law.

    Args:
        beta: concentration of the law: the smaller, the more skewed are the clients' classes. A run's identity and its
            record have it at their top.
    """

    beta: float = knob(above=0, identity=False)


@dataclass
class Dirichlet(DirichletPartition):
    """Label skew by a Dirichlet law, balanced by a cap, as the public code of the papers does it.

    Class by class, shares p ~ Dir(beta, ..., beta) over the clients; a client that already holds n / K samples or more
    gets none of this class. The whole draw is repeated until every client holds `min_size` samples.

    Args:
        min_size: fewest samples of a task at a client; 0 lets clients be empty.
        retries: draws before giving up with an error.
    """

    name: ClassVar[str] = "dirichlet"
    min_size: int = knob(1, least=0)
    retries: int = knob(1000, least=1)

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        if self.min_size * clients > len(labels):
            raise UserError(
                f"partition.min_size={self.min_size} for clients={clients} asks for {self.min_size * clients} samples"
                f" and a task has {len(labels)}",
                f"partition.min_size={len(labels) // clients} at most, or fewer clients or tasks",
            )
        classes, class_of_sample = np.unique(labels, return_inverse=True)
        by_class = parts(class_of_sample, len(classes))
        fullest = 0
        for _ in range(self.retries):
            owner = self._draw(by_class, clients, rng)
            smallest = int(np.bincount(owner, minlength=clients).min())
            if smallest >= self.min_size:
                return owner
            fullest = max(fullest, smallest)
        raise UserError(
            f"partition.min_size={self.min_size} was not met in {self.retries} draws with clients={clients},"
            f" beta={self.beta:g} (best smallest client: {fullest})",
            f"partition.min_size={fullest}, a larger beta, or fewer clients or tasks",
        )

    def _draw(self, by_class: list[np.ndarray], clients: int, rng: np.random.Generator) -> np.ndarray:
        owner = np.empty(sum(map(len, by_class)), dtype=np.int64)
        held = np.zeros(clients, dtype=np.int64)
        cap = len(owner) / clients
        for indices in by_class:
            members = rng.permutation(indices)
            shares = rng.dirichlet(np.full(clients, self.beta)) * (held < cap)
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


def log_dirichlet(beta: float, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Logarithms of Dir(beta, ..., beta) shares up to a constant per row; their softmax over a row is one draw.

    In logarithms, because a small beta makes all shares but one vanish in float64, and then there is nothing left to
    compare among the other columns: Gamma(beta) = Gamma(beta + 1) U^(1 / beta). The softmax over some of the columns is
    what a Dirichlet draw is given those columns, again Dir(beta, ..., beta).

    Returns:
        (rows, columns) float64, finite for every beta above 0.
    """
    size = (rows, columns)
    with np.errstate(over="ignore"):
        logs = np.log(rng.standard_gamma(beta + 1, size)) - rng.standard_exponential(size) / beta
    return np.maximum(logs, -1e300)


def owners(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The client of each sample, when client k holds counts[c, k] samples of class c; which ones is random.

    Args:
        labels: (n,) the samples' classes; row c of `counts` is of the c-th smallest.
        counts: (C, K), each row adds up to its class's samples.
        rng: of the choice among a class's samples.

    Returns:
        (n,) int64.
    """
    by_class = np.lexsort((rng.random(len(labels)), labels))
    clients = np.broadcast_to(np.arange(counts.shape[1]), counts.shape)
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_class] = np.repeat(clients.ravel(), counts.ravel())
    return owner
