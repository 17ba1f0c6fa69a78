"""Samples in groups, such as classes, tasks or clients."""

from __future__ import annotations

import numpy as np


def parts(group_of_sample: np.ndarray, groups: int) -> list[np.ndarray]:
    """The ascending indices of each group's samples, given each sample's group (n,); -1 means no group."""
    by_group = np.argsort(group_of_sample, kind="stable")
    counts = np.bincount(group_of_sample + 1, minlength=groups + 1)
    return np.split(by_group, np.cumsum(counts)[:-1])[1:]


def rank_in_group(groups: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
    """How many samples of its group come before each sample (n,) int64, in ascending `order` (n,) or as they stand."""
    by_group = np.argsort(groups, kind="stable") if order is None else np.lexsort((order, groups))
    ordered = groups[by_group]
    rank = np.empty(len(groups), dtype=np.int64)
    rank[by_group] = np.arange(len(groups)) - np.searchsorted(ordered, ordered)
    return rank
