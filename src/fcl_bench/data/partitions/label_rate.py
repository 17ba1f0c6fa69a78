"""Label scarcity: which of a client's samples are labelled."""

from __future__ import annotations

import numpy as np

from fcl_bench.data.groups import rank_in_group


def draw_labelled(labels: np.ndarray, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Which samples (n,) are labelled: the share `rate`, rounded to the nearest number and stratified by class.

    Every class retains floor(rate * n_c) of its labels at random; the rest of the budget goes to the classes with the
    largest remainders. A client with very few samples may retain none.

    Args:
        labels: (n,) one client's labels of one task.
        rate: `label_rate`, above 0 to 1.
        rng: the generator of this client and task.
    """
    order = rng.permutation(len(labels))
    _, members, sizes = np.unique(labels[order], return_inverse=True, return_counts=True)
    quota = np.floor(rate * sizes + 1e-9).astype(np.int64)
    missing = int(np.floor(rate * len(labels) + 0.5)) - int(quota.sum())
    # Ties between remainders go to the class that comes first in the random order, not to the lowest label.
    first = np.unique(members, return_index=True)[1]
    by_remainder = np.lexsort((first, -(rate * sizes - quota)))
    quota[by_remainder[: max(missing, 0)]] += 1
    labelled = np.zeros(len(labels), dtype=bool)
    labelled[order] = rank_in_group(members) < quota[members]
    return labelled
