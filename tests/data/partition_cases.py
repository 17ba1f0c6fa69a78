"""What tests of partitions share: labels of any shape, and how much of each class each client holds."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st


@st.composite
def uneven_labels(draw: st.DrawFn, least: int = 1, most: int = 60, classes: int = 8) -> np.ndarray:
    """Shuffled labels of up to `classes` classes, `least` to `most` samples each, with gaps between the labels."""
    sizes = draw(st.lists(st.integers(least, most), min_size=1, max_size=classes))
    names = 3 * np.arange(len(sizes)) + 1
    return np.random.default_rng(draw(st.integers(0, 2**32))).permutation(np.repeat(names, sizes))


def counts(labels: np.ndarray, owner: np.ndarray, clients: int) -> np.ndarray:
    """(C, K): samples of each class, in ascending order, at each client."""
    columns = np.unique(labels, return_inverse=True)[1]
    table = np.zeros((columns.max(initial=-1) + 1, clients), dtype=np.int64)
    np.add.at(table, (columns, owner), 1)
    return table


def same_mean(first: np.ndarray, second: np.ndarray, errors: float = 4.5) -> np.ndarray:
    """Whether two samples of draws (s, ...) have the same mean, within so many standard errors of their difference."""
    first, second = (np.asarray(side, dtype=float) for side in (first, second))
    error = np.sqrt(first.var(axis=0, ddof=1) / len(first) + second.var(axis=0, ddof=1) / len(second))
    return np.abs(first.mean(axis=0) - second.mean(axis=0)) <= errors * error + 1e-12
