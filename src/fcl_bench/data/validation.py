"""Validation samples: a share of every client's training samples that no client trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fcl_bench.data.partitions.base import Holdings
from fcl_bench.data.sources.base import rank_in_group
from fcl_bench.data.splits.base import Stream
from fcl_bench.errors import UserError
from fcl_bench.randomness import generator


def draw_validation(columns: np.ndarray, clients: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Which of one task's samples (n,) are held out: the share of every class, as evenly over the clients as it goes.

    Of the n_c samples of a class, v_c = round(share * n_c) are held out, one at least where there are two. Client k
    gives floor(share * n_kc) of its n_kc, or one more where share * n_kc has one of the largest remainders, at random.

    Args:
        columns, clients: (n,) the class of each sample, and the client that holds it.
        share: above 0 and below 1.
    """
    order = rng.permutation(len(columns))
    # Samples of the same class and client: one group.
    _, first, group, size = np.unique(
        np.stack([columns[order], clients[order]]), axis=1, return_index=True, return_inverse=True, return_counts=True
    )
    class_of_group = np.unique(columns[order][first], return_inverse=True)[1]
    of_class = np.bincount(class_of_group, weights=size).astype(np.int64)
    wanted = np.maximum(np.floor(share * of_class + 0.5).astype(np.int64), (of_class > 1).astype(np.int64))
    quota = np.floor(share * size + 1e-9).astype(np.int64)
    left = wanted - np.bincount(class_of_group, weights=quota).astype(np.int64)
    # Among equal remainders the group whose first sample comes first in the random order.
    preference = np.empty(len(size), dtype=np.int64)
    preference[np.lexsort((first, quota - share * size))] = np.arange(len(size))
    quota += rank_in_group(class_of_group, preference) < left[class_of_group]
    held = np.zeros(len(columns), dtype=bool)
    held[order] = rank_in_group(group.ravel()) < quota[group.ravel()]
    return held


def hold_out(
    stream: Stream, shards: Sequence[Holdings], share: float, seed: int, only: bool
) -> tuple[Stream, list[Holdings]]:
    """The stream and the clients' holdings without the validation samples, which `Stream.validation` names.

    Args:
        only: whether the validation samples are what the run is tested on, in the test set's place (`data.test=false`).

    Raises:
        UserError: a task has no validation sample, or no training sample is left to it.
    """
    kept, held = [], []
    for t, own in enumerate(shards):
        clients = np.repeat(np.arange(len(own)), own.sizes())
        out = draw_validation(stream.train_columns[own.indices], clients, share, generator(seed, "validation", t))
        if not out.any() or out.all():
            raise UserError(
                f"data.validation={share:g}: of the {len(out)} training samples of task {t},"
                f" {int(out.sum())} would be held out",
                "a share that leaves some on both sides, or fewer tasks",
            )
        ends = np.concatenate([[0], np.cumsum(~out)])[own.ends]
        kept.append(Holdings(own.indices[~out], ends))
        held.append(np.sort(own.indices[out]))
    train = tuple(np.setdiff1d(own, out, assume_unique=True) for own, out in zip(stream.train, held, strict=True))
    left = replace(stream, train=train, validation=tuple(held))
    if only:
        left = replace(left, test=left.validation, test_columns=stream.train_columns)
    return left, kept
