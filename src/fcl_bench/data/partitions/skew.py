"""How far the clients' classes are from their task's, and how usual that is among other draws of the partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TypedDict

import numpy as np

from fcl_bench.data.partitions.base import Holdings, Partition
from fcl_bench.data.shared import described, shared
from fcl_bench.randomness import generator

#: Other draws that a partition is compared with, and the fewest.
_DRAWS, _LEAST = 200, 20
#: Shares of all these draws together: above the first number there are fewer draws, above the second none.
_MANY, _MOST = 5_000_000, 20_000_000
#: Shares that are drawn at once.
_BLOCK = 500_000
#: Their seed. Runs have small ones.
_SEED = 2**31


class Skew(TypedDict):
    """How skewed the partition is: total variation, 0 (each client has its task's classes) to 1 (nothing in common)."""

    total_variation: float | None  # mean over all pairs of a task and a client with samples of it
    by_task: list[float]  # the mean of each task alone
    percentile: float | None  # percent of the other draws that are less skewed
    draws: int  # other draws of the same partition, with other seeds
    why: str | None  # there is no percentile


def skew(partition: Partition, columns: np.ndarray, shards: Sequence[Holdings]) -> Skew:
    """The skew of a run's training samples."""
    samples = [own.indices for own in shards]
    if not sum(map(len, samples)):
        return {"total_variation": None, "by_task": [], "percentile": None, "draws": 0, "why": "no samples are here"}
    distances = [_distances(columns[own.indices], own) for own in shards]
    mean = float(np.concatenate(distances).mean())
    sizes = [np.unique(columns[indices], return_counts=True)[1] for indices in samples]
    key = [described(partition), [size.tolist() for size in sizes], len(shards[0])]
    make = partial(_others, partition, sizes, len(shards[0]))
    others, why = shared("other draws of a partition", key, make, lambda found: int(found[0].nbytes))
    return {
        "total_variation": mean,
        "by_task": [float(each.mean()) for each in distances],
        # A difference in rounding alone is none.
        "percentile": round(float(100 * np.mean(others < mean - 1e-9)), 1) if len(others) else None,
        "draws": len(others),
        "why": why,
    }


def _distances(labels: np.ndarray, own: Holdings) -> np.ndarray:
    """Total variation between the classes of each client that has samples, and those of all of the task's samples.

    It is 1 - sum_c min(p_kc, p_c), to which classes that a client lacks add nothing.
    """
    clients = np.repeat(np.arange(len(own)), own.sizes())
    names, columns = np.unique(labels, return_inverse=True)
    pairs, counts = np.unique(clients * len(names) + columns, return_counts=True)
    client, column = np.divmod(pairs, len(names))
    common = np.minimum(counts / own.sizes()[client], np.bincount(columns)[column] / len(labels))
    return 1 - np.bincount(client, common, len(own))[own.sizes() > 0]


def _others(partition: Partition, sizes: Sequence[np.ndarray], clients: int) -> tuple[np.ndarray, str | None]:
    """The mean distance (D,) in other draws of all tasks; where there are none, why not."""
    none, shares = np.zeros(0), clients * sum(map(len, sizes))
    draws = min(_DRAWS, max(_LEAST, _MANY // shares))
    if draws * shares > _MOST:
        return none, f"{draws} draws of {shares:,} shares each would take too long"
    total = number = np.zeros(draws)
    for size, tasks in Counter(tuple(size.tolist()) for size in sizes).items():
        rng = generator(_SEED, "other draws of a partition", *size)
        # Rows with the sum of the distances and their number, of one task each.
        rows = np.zeros((0, 2))
        once = 1 if partition.repeats else tasks
        for left in range(draws * once, 0, -(block := max(1, _BLOCK // (clients * len(size))))):
            counts = partition.redraws(np.array(size), clients, min(left, block), rng)
            if counts is None:
                return none, f"partition={partition.name} draws no Dirichlet shares task by task"
            rows = np.concatenate([rows, _sums(counts)])
        kept = min(len(total), len(rows) // once)
        of_tasks = rows[: kept * once].reshape(kept, once, 2).sum(axis=1) * (tasks / once)
        total, number = total[:kept] + of_tasks[:, 0], number[:kept] + of_tasks[:, 1]
    if len(total) < _LEAST:
        return none, "nearly no draw gives each client partition.min_size samples"
    return total / number, None


def _sums(counts: np.ndarray) -> np.ndarray:
    """The sum of `_distances` and their number (D, 2), given the samples (D, C, K) in each draw of a task."""
    held, of_class = counts.sum(axis=1), counts.sum(axis=2)
    mix = of_class / of_class.sum(axis=1, keepdims=True)
    common = np.minimum(counts / np.maximum(held, 1)[:, None], mix[:, :, None]).sum(axis=(1, 2))
    there = (held > 0).sum(axis=1)
    return np.stack([there - common, there], axis=1)
