"""DS-AL in plain NumPy, float64, on all samples of each task in one place: two stages, one after the other.

tasks: per task, per client, (Z (n, d), columns (n,)); P (d, M) or None. Returns (W, W_c) per task.
"""

import numpy as np


def streams(Z, P):
    """Features of the main and of the compensation stream: two activations of the same projection."""
    linear = Z if P is None else Z @ P
    return (Z if P is None else np.maximum(linear, 0)), np.tanh(linear)


def ds_al(tasks, P, gamma, gamma_c):
    classifiers, seen, residuals = [], [], []
    for clients in tasks:
        Z, labels = (np.concatenate(parts) for parts in zip(*clients, strict=True))
        seen.append((Z, labels.astype(np.int64)))
        Z_all, labels_all = (np.concatenate(parts) for parts in zip(*seen, strict=True))
        Y = np.eye(1 + labels_all.max())[labels_all]
        H, K = streams(Z_all, P)
        W = np.linalg.solve(H.T @ H + gamma * np.eye(H.shape[1]), H.T @ Y)
        # The task's residual under the W of now; previous label cleansing: classes that the task has not, count as 0.
        R = Y[-len(Z) :] - H[-len(Z) :] @ W
        R[:, np.setdiff1d(np.arange(Y.shape[1]), labels)] = 0
        residuals = [np.pad(old, ((0, 0), (0, Y.shape[1] - old.shape[1]))) for old in residuals] + [R]
        W_c = np.linalg.solve(K.T @ K + gamma_c * np.eye(K.shape[1]), K.T @ np.concatenate(residuals))
        classifiers.append((W, W_c))
    return classifiers


def scores(Z, P, W, W_c, kappa):
    H, K = streams(Z, P)
    return H @ W + kappa * (K @ W_c)
