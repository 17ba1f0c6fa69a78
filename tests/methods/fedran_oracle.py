"""FedRAN in plain NumPy, float64, written from the paper's equations alone."""

import numpy as np


def client_summary(H, rank):
    """Eq. 9: full thin SVD, truncated."""
    _, s, Vt = np.linalg.svd(H, full_matrices=False)
    r = min(rank, *H.shape)
    return Vt[:r].T, s[:r]


def merge(parts, rank):
    """Eq. 16-19 for two or more summaries."""
    A = np.concatenate([V * s for V, s in parts], axis=1)
    Q, R = np.linalg.qr(A)
    U, S, _ = np.linalg.svd(R, full_matrices=False)
    return Q @ U[:, :rank], S[:rank]


def sequential(parts, rank):
    merged = parts[0]
    for part in parts[1:]:
        merged = merge([merged, part], rank)
    return merged


def tree(parts, rank):
    """The left subtree is the largest full one."""
    if len(parts) == 1:
        return parts[0]
    left = 1
    while 2 * left < len(parts):
        left *= 2
    return merge([tree(parts[:left], rank), tree(parts[left:], rank)], rank)


def joint(parts, rank):
    return merge(parts, rank) if len(parts) > 1 else parts[0]


SPATIAL = {"sequential": sequential, "tree": tree, "joint": joint}


def fedran(tasks, P, rank, ridge, order="sequential"):
    """The classifier after each task (Alg. 1).

    tasks: per task, per client, (Z (n, d), columns (n,)); P (d, M) or None.
    """
    state, B, classifiers = None, None, []
    for clients in tasks:
        classes = 1 + max(int(labels.max()) for _, labels in clients if len(labels))
        parts = []
        for Z, labels in clients:
            H = Z if P is None else np.maximum(Z @ P, 0)
            if B is None:
                B = np.zeros((H.shape[1], 0))
            B = np.pad(B, ((0, 0), (0, max(0, classes - B.shape[1]))))
            if len(labels):
                B = B + H.T @ np.eye(classes)[labels]
                parts.append(client_summary(H, rank))
        spatial = SPATIAL[order](parts, rank)
        state = spatial if state is None else merge([state, spatial], rank)
        V, s = state
        classifiers.append(V @ np.diag(1 / (s**2 + ridge)) @ V.T @ B)
    return classifiers
