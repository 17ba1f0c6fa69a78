"""Space: the partitions whose shares are drawn from a Dirichlet law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.special import softmax

from fcl_bench.config import knob
from fcl_bench.data.partitions.base import Partition
from fcl_bench.data.sources.base import parts, rank_in_group
from fcl_bench.errors import UserError
from fcl_bench.randomness import legacy_generator

#: Draws before giving up; they take 0.3 to 9 seconds.
_DRAWS = 1000
#: The same of draws that are only compared with; those that were not met are left out.
_REDRAWS = 25


@dataclass
class DirichletPartition(Partition):
    """A rule whose shares are drawn from a Dirichlet law.

    Args:
        beta: concentration of the law: a smaller value makes the clients' classes more skewed. A run's identity and its
            record store it at their top level.
    """

    beta: float = knob(least=1e-6, identity=False)


@dataclass
class Dirichlet(DirichletPartition):
    """Label skew by a Dirichlet law, balanced by a cap, as in the papers' public code.

    For each class in turn, shares p ~ Dir(beta, ..., beta) over the clients are drawn; a client that already holds n /
    K samples or more gets none of this class. The whole draw is repeated until every client holds `min_size` samples.

    Raises (in `assign`):
        UserError: no draw gave every client that many.
    """

    name: ClassVar[str] = "dirichlet"
    min_size: int = knob(1, least=0)

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
        for _ in range(_DRAWS):
            owner = self._draw(by_class, clients, rng)
            smallest = int(np.bincount(owner, minlength=clients).min())
            if smallest >= self.min_size:
                return owner
            fullest = max(fullest, smallest)
        raise UserError(
            f"partition.min_size={self.min_size} was not met in {_DRAWS} draws with clients={clients},"
            f" beta={self.beta:g} (best smallest client: {fullest})",
            f"partition.min_size={fullest}, a larger beta, or fewer clients or tasks",
        )

    def _draw(self, by_class: list[np.ndarray], clients: int, rng: np.random.Generator) -> np.ndarray:
        owner = np.empty(sum(map(len, by_class)), dtype=np.int64)
        held = np.zeros(clients, dtype=np.int64)
        cap = len(owner) / clients
        for indices in by_class:
            members = rng.permutation(indices)
            counts = self._counts(rng.dirichlet(np.full(clients, self.beta)), held < cap, len(members))
            owner[members] = np.repeat(np.arange(clients), counts)
            held += counts
        return owner

    def redraws(self, sizes: np.ndarray, clients: int, draws: int, rng: np.random.Generator) -> np.ndarray:
        counts = np.zeros((draws, len(sizes), clients), dtype=np.int64)
        left = np.arange(draws)
        for _ in range(_REDRAWS):
            held = np.zeros((len(left), clients), dtype=np.int64)
            for c, size in enumerate(sizes):
                shares = rng.dirichlet(np.full(clients, self.beta), len(left))
                counts[left, c] = self._counts(shares, held < sizes.sum() / clients, size)
                held += counts[left, c]
            left = left[held.min(axis=1) < self.min_size]
            if not len(left):
                break
        return np.delete(counts, left, axis=0)

    def _counts(self, shares: np.ndarray, free: np.ndarray, size: int) -> np.ndarray:
        """How many of a class's samples each client gets (..., K).

        Args:
            shares: (..., K) as drawn.
            free: (..., K) bool, which clients are below the cap.
            size: samples of the class.
        """
        shares = shares * free
        # A small beta can put all of its mass on full clients; the public code divides by zero here. At least one
        # client is below the cap, since fewer than n samples are assigned.
        shares = np.where(shares.sum(axis=-1, keepdims=True) == 0, free, shares)
        ends = (np.cumsum(shares / shares.sum(axis=-1, keepdims=True), axis=-1) * size).astype(np.int64)
        # The last cut is the end of the class regardless of rounding, but never at a client that is full.
        clients = shares.shape[-1]
        last = clients - 1 - np.argmax(shares[..., ::-1] > 0, axis=-1)
        return np.diff(np.where(np.arange(clients) >= last[..., None], size, ends), prepend=0, axis=-1)


@dataclass
class Published(Dirichlet):
    """`Dirichlet` with the very draws of the public code of TARGET, LANDER and STSA.

    These seed NumPy's old generator anew in every task, so tasks of the same sizes are shared out alike. If all shares
    that are left are zero, or not finite at a tiny beta, the last client gets the whole class.
    """

    name: ClassVar[str] = "published"
    repeats: ClassVar[bool] = True

    def generator(self, seed: int, task: int) -> np.random.RandomState:
        return legacy_generator(seed)

    def _counts(self, shares: np.ndarray, free: np.ndarray, size: int) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            shares = shares * free
            running = np.cumsum(shares / shares.sum(axis=-1, keepdims=True), axis=-1)
        ends = (np.where(np.isnan(running), 0, running) * size).astype(np.int64)
        ends[..., -1] = size
        return np.diff(ends, prepend=0, axis=-1)


@dataclass
class DirichletAllClasses(DirichletPartition):
    """Label skew by a Dirichlet law, every class at every client: FedProTIP's text (Appendix E.4).

    For each class, shares p ~ Dir(beta, ..., beta) over the clients are drawn; client k gets p_k n_c of the class's n_c
    samples, rounded down or up so that its mean is p_k n_c. "We prevent empty assignments": a client left with none
    then gets one sample, drawn at random from the others' samples; each of them retains at least one. There is no cap,
    so clients differ in size.

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
        return owners(labels, self._counts(sizes, clients, rng), rng)

    def redraws(self, sizes: np.ndarray, clients: int, draws: int, rng: np.random.Generator) -> np.ndarray:
        return self._counts(np.tile(sizes, draws), clients, rng).reshape(draws, len(sizes), clients)

    def _counts(self, sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        counts = _rounded(softmax(log_dirichlet(self.beta, len(sizes), clients, rng), axis=1), sizes, rng)
        for c in np.flatnonzero((counts == 0).any(axis=1)):
            _fill(counts[c], rng)
        return counts


def _rounded(shares: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Integers next to shares * sizes (C, K) that add up to `sizes` (C,) over each row, and are right in the mean.

    One random shift moves all cuts of a row. Cuts at the floor of the running sum without this shift, as in public
    code, would move half a sample of every class from the first client to the last.
    """
    edges = np.floor(np.cumsum(shares, axis=1) * sizes[:, None] + rng.random((len(sizes), 1))).astype(np.int64)
    # The last cut is the end of the class and no cut lies beyond it, regardless of rounding.
    edges = np.minimum(edges, sizes[:, None])
    edges[:, -1] = sizes
    return np.diff(edges, axis=1, prepend=0)


def _fill(counts: np.ndarray, rng: np.random.Generator) -> None:
    """Give each client without a sample of a class one from clients with several; `counts` (K,), in place."""
    empty = counts == 0
    counts -= rng.multivariate_hypergeometric(np.maximum(counts - 1, 0), int(empty.sum()))
    counts[empty] = 1


@dataclass
class DirichletEqualSizes(DirichletPartition):
    """Label skew by a Dirichlet law at clients of equal size: AFCL's text (Appendix F.1).

    Every client has n / K places (these numbers differ by one at most; which clients have one more is random) and a
    preference q_k ~ Dir(beta, ..., beta) over the task's classes. Each place draws a class from its client's preference
    among the classes that still have samples. Where more places draw a class than it has samples, a random subset of
    them gets the samples. The others draw again, from what is left of their preference, once all others have drawn.
    """

    name: ClassVar[str] = "dirichlet_equal_sizes"

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        return owners(labels, self._counts(np.unique(labels, return_counts=True)[1], clients, rng), rng)

    def redraws(self, sizes: np.ndarray, clients: int, draws: int, rng: np.random.Generator) -> np.ndarray:
        # One draw takes as long as a task's assignment, so there are fewer.
        return np.stack([self._counts(sizes, clients, rng) for _ in range(-(-draws // 10))])

    def _counts(self, left: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Samples (C, K) of each class at each client, given those of each class (C,)."""
        classes, samples = len(left), int(left.sum())
        sizes = samples // clients + (rng.permutation(clients) < samples % clients)
        preferences = log_dirichlet(self.beta, clients, classes, rng)
        # The clients of the open places in the order in which they are served; the order is drawn once for all rounds.
        places = rng.permutation(np.repeat(np.arange(clients), sizes))
        counts = np.zeros((classes, clients), dtype=np.int64)
        while len(places):
            there = np.flatnonzero(left)
            drawn = there[_draws(softmax(preferences[:, there], axis=1), places, rng)]
            served = rank_in_group(drawn) < left[drawn]
            np.add.at(counts, (drawn[served], places[served]), 1)
            left = left - np.bincount(drawn[served], minlength=classes)
            places = places[~served]
        return counts


def _draws(shares: np.ndarray, places: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One draw (m,) of 0..C-1 for each of `places` (m,), from the row of `shares` (K, C) that it names."""
    clients, classes = shares.shape
    # One search for all rows: row k's running sums lie between k and k + 1.
    edges = (np.cumsum(shares, axis=1) + np.arange(clients)[:, None]).ravel()
    found = np.searchsorted(edges, places + rng.random(len(places)), side="right") - classes * places
    return np.clip(found, 0, classes - 1)  # a running sum may miss 1 by rounding


def log_dirichlet(beta: float, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Logarithms (rows, columns) of Dir(beta, ..., beta) shares; the softmax over a row is one draw. All are finite.

    Logarithms are used because a small beta makes all shares but one underflow in float64, and the other columns could
    then not be compared: Gamma(beta) = Gamma(beta + 1) U^(1 / beta). The softmax over some of the columns is what a
    Dirichlet draw is given those columns, again Dir(beta, ..., beta).
    """
    size = (rows, columns)
    with np.errstate(over="ignore"):
        logs = np.log(rng.standard_gamma(beta + 1, size)) - rng.standard_exponential(size) / beta
    return np.maximum(logs, -1e300)


def owners(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The client (n,) of each sample if client k holds counts[c, k] samples of class c; which samples is random.

    Args:
        labels: (n,) the samples' classes; row c of `counts` belongs to the c-th smallest.
        counts: (C, K); each row adds up to the number of its class's samples.
    """
    by_class = np.lexsort((rng.random(len(labels)), labels))
    clients = np.broadcast_to(np.arange(counts.shape[1]), counts.shape)
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_class] = np.repeat(clients.ravel(), counts.ravel())
    return owner
