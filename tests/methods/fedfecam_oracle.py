"""FeCAM in plain NumPy, float64, from its equations, on all data in one place.

Z (n, d), labels (n,). Distances (n, C) of samples `queries`; inf to a class without a sample.
"""

import numpy as np


def unit(vectors):
    lengths = np.sqrt((vectors**2).sum(axis=-1, keepdims=True))
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)


def shrink(S, a1, a2):
    """S + a1 V1 I + a2 V2 (1 1' - I); V2 over the entries beside the diagonal that are not zero."""
    d = len(S)
    beside = S[~np.eye(d, dtype=bool)]
    beside = beside[beside != 0]
    V1, V2 = np.diag(S).mean(), (beside.mean() if len(beside) else 0.0)
    return S + a1 * V1 * np.eye(d) + a2 * V2 * (np.ones((d, d)) - np.eye(d))


def correlation(S):
    s = np.sqrt(np.diag(S))
    return S / np.outer(s, s)


def prepared(deviations, freedom, knobs):
    """The covariance of centred rows, shrunk and scaled; the identity where nothing varies."""
    S = deviations.T @ deviations / max(freedom, 1)
    if freedom < 1 or not S.any():
        return np.eye(deviations.shape[1])
    for _ in range(knobs["shrinkings"]):
        S = shrink(S, knobs["a1"], knobs["a2"])
    return correlation(S)


def distances(Z, labels, queries, knobs):
    power = knobs["tukey"]
    h, C = Z**power, 1 + labels.max()
    u = unit(queries**power)
    D = np.full((len(queries), C), np.inf)
    for c in np.unique(labels):
        own = labels == c
        S = prepared(h[own] - h[own].mean(axis=0), own.sum() - 1, knobs)
        r = u - unit(Z[own].mean(axis=0) ** power)
        D[:, c] = np.einsum("ni,ij,nj->n", r, np.linalg.pinv(S, hermitian=True), r)
    return D
