"""AIR and logit adjustment in plain NumPy, float64, written from the equations: a class, or a sample, at a time.

tasks: per task, per client, (Z (n, d), columns (n,)); P (d, M) or None.
"""

import numpy as np


def pooled(tasks, P):
    """H (n, M), columns (n,) and task (n,) of everyone's samples."""
    parts = [(t, Z, labels) for t, clients in enumerate(tasks) for Z, labels in clients]
    Z = np.concatenate([Z for _, Z, _ in parts])
    when = np.concatenate([np.full(len(labels), t) for t, _, labels in parts])
    labels = np.concatenate([labels for _, _, labels in parts]).astype(np.int64)
    return (Z if P is None else np.maximum(Z @ P, 0)), labels, when


def printed(H, labels, gamma):
    """The paper's form: W = (sum_y pi_y A_y + gamma I)^-1 (pi_y c_y), with A_y and c_y of all samples of class y."""
    M, A, columns = H.shape[1], 0, []
    for y in range(1 + labels.max()):
        own = H[labels == y]
        pi = 1 / len(own)
        A = A + pi * own.T @ own
        columns.append(pi * own.sum(axis=0))
    return np.linalg.inv(A + gamma * np.eye(M)) @ np.stack(columns, axis=1)


def sample_weights(labels, when):
    """(n,) 1 over how many samples of its class there are up to the end of each sample's task."""
    return np.array([1 / np.sum((labels == y) & (when <= t)) for y, t in zip(labels, when, strict=True)])


def weighted(tasks, P, gamma, normalise):
    """W after each task: each sample keeps the weight that it had in its task."""
    H, labels, when = pooled(tasks, P)
    pi, classifiers = sample_weights(labels, when), []
    for t in range(len(tasks)):
        now = when <= t
        C = 1 + labels[now].max()
        sizes = np.bincount(labels[now], minlength=C)
        ridge = gamma * np.mean(1 / sizes[sizes > 0]) if normalise else gamma
        D = np.diag(pi[now])
        system = H[now].T @ D @ H[now] + ridge * np.eye(H.shape[1])
        classifiers.append(np.linalg.solve(system, H[now].T @ D @ np.eye(C)[labels[now]]))
    return classifiers


def adjusted(scores, sizes, tau):
    """scores_c - tau log(n_c / N)."""
    return scores - tau * np.log(sizes / sizes.sum())


def gcv_scores(H, Y, pi, ridges):
    """Of each ridge, N RSS / (N - df)^2 of the rows sqrt(pi) (h, y), from the N x N hat matrix."""
    A, T, N = np.sqrt(pi)[:, None] * H, np.sqrt(pi)[:, None] * Y, len(H)
    scores = []
    for ridge in ridges:
        hat = A @ np.linalg.inv(A.T @ A + ridge * np.eye(A.shape[1])) @ A.T
        scores.append(N * np.sum((T - hat @ T) ** 2) / (N - np.trace(hat)) ** 2)
    return scores
