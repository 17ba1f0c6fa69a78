"""What the Dirichlet forms of `partition_*.py` share: the draw of the shares, and who gets which samples."""

from __future__ import annotations

import numpy as np


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
