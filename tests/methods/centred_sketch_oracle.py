"""The centred sketch in plain NumPy, float64, with a dense M x M state.

tasks: per task, per client, (Z (n, d), columns (n,)); P (d, M) or None.
"""

import numpy as np


def client_upload(H, labels, rank):
    """V (M, r), sigma (r,), tau, and per class that the client holds its sum S_c (M,) and count n_c."""
    n, M = H.shape
    A, sums, counts = H.copy(), {}, {}
    for c in sorted({int(label) for label in labels}):
        rows = labels == c
        sums[c], counts[c] = H[rows].sum(axis=0), int(rows.sum())
        A[rows] = H[rows] - sums[c] / counts[c]
    _, s, Vt = np.linalg.svd(A, full_matrices=False)
    r = min(rank, n, M)
    tau = (np.sum(A**2) - np.sum(s[:r] ** 2)) / (M - r) if r < M else 0.0
    return Vt[:r].T, s[:r], tau, sums, counts


def states(tasks, P, rank):
    """(G, delta, B) after each task."""
    M = tasks[0][0][0].shape[1] if P is None else P.shape[1]
    G, delta, B, after = np.zeros((M, M)), 0.0, np.zeros((M, 0)), []
    for clients in tasks:
        for Z, labels in clients:
            if len(labels) == 0:
                continue
            H = Z if P is None else np.maximum(Z @ P, 0)
            C = max(B.shape[1], 1 + int(labels.max()))
            B = np.pad(B, ((0, 0), (0, C - B.shape[1]))) + H.T @ np.eye(C)[labels]
            V, sigma, tau, sums, counts = client_upload(H, labels, rank)
            G = G + V @ (np.diag(sigma**2) - tau * np.eye(len(sigma))) @ V.T
            delta = delta + tau
            for c, S in sums.items():
                G = G + np.outer(S, S) / counts[c]
        after.append((G, delta, B))
    return after


def gram(tasks, P, rank):
    """(G, delta) after the last task; the estimate of the Gram matrix is G + delta I."""
    G, delta, _ = states(tasks, P, rank)[-1]
    return G, delta


def centred_sketch(tasks, P, rank, ridge):
    """W = (G + (delta + ridge) I)^-1 B after each task."""
    return [np.linalg.solve(G + (delta + ridge) * np.eye(len(G)), B) for G, delta, B in states(tasks, P, rank)]
