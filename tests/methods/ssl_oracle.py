"""FedRAN-SSL's pseudo-labels in plain NumPy, float64, with loops (Alg. 4, Eq. 13-15)."""

import numpy as np


def pseudo_labels(Z, y, U, tau):
    """A class for each row of U, or -1 where none is accepted; Z (n, d), y (n,): the client's labelled features.

    A feature of norm 0 is never accepted, a prototype of norm 0 never chosen; a tie goes to the smaller class.
    """
    prototypes = {}
    for c in sorted({int(label) for label in y}):
        # Eq. 13, and the normalisation after it.
        mean = np.mean([Z[i] for i in range(len(y)) if y[i] == c], axis=0)
        norm = np.sqrt(np.sum(mean**2))
        if norm > 0:
            prototypes[c] = mean / norm
    accepted = []
    for u in U:
        best, best_cosine = -1, -np.inf
        norm = np.sqrt(np.sum(u**2))
        if norm > 0:
            for c, p in prototypes.items():
                # Eq. 14.
                cosine = np.sum(u / norm * p)
                if cosine > best_cosine:
                    best, best_cosine = c, cosine
        # Eq. 15.
        accepted.append(best if best_cosine >= tau else -1)
    return np.array(accepted, dtype=np.int64)
