"""STSA and STSA-E in plain NumPy, float64, written from the paper's equations alone.

tasks: per task, per client, (Z (n, d), columns (n,)); P (d, M) or None. Every function returns W (M, C_t) per task.
"""

import numpy as np


def features(Z, P):
    """Eq. 1: a random matrix followed by a ReLU."""
    return Z if P is None else np.maximum(Z @ P, 0)


def stsa(tasks, P, gamma):
    """Eq. 2 (sum over clients), Eq. 4 (sum over tasks, new columns), Eq. 8 (ridge)."""
    M = tasks[0][0][0].shape[1] if P is None else P.shape[1]
    G, B, classifiers = np.zeros((M, M)), np.zeros((M, 0)), []
    for clients in tasks:
        for Z, labels in clients:
            if len(labels) == 0:
                continue
            H = features(Z, P)
            C = max(B.shape[1], 1 + int(labels.max()))
            B = np.pad(B, ((0, 0), (0, C - B.shape[1])))
            G = G + H.T @ H
            B = B + H.T @ np.eye(C)[labels]
        classifiers.append(np.linalg.solve(G + gamma * np.eye(M), B))
    return classifiers


def centralised(tasks, P, ridge):
    """Eq. 6-7: all the data so far in one place."""
    classifiers = []
    for t in range(len(tasks)):
        parts = [part for clients in tasks[: t + 1] for part in clients]
        H = features(np.concatenate([Z for Z, _ in parts]), P)
        labels = np.concatenate([labels for _, labels in parts]).astype(np.int64)
        Y = np.eye(1 + int(labels.max()))[labels]
        classifiers.append(np.linalg.solve(H.T @ H + ridge * np.eye(H.shape[1]), H.T @ Y))
    return classifiers


def estimate_gram(groups, estimator):
    """Eq. 9 over the dummy clients of one task; groups: (C (M, c), n (c,)) each, the empty ones included.

    'paper': K is the number of all groups and both coefficients are at least 0; 'unbiased': K is K_i, the number of
    groups that hold class i. Where that number is 1 the covariance cannot be estimated: S S' / n_i.
    """
    M, classes = groups[0][0].shape
    G = np.zeros((M, M))
    for i in range(classes):
        S, n_i, K_i, first = np.zeros(M), 0, 0, np.zeros((M, M))
        for C, n in groups:
            if n[i] == 0:
                continue
            S = S + C[:, i]
            n_i = n_i + int(n[i])
            K_i = K_i + 1
            first = first + np.outer(C[:, i], C[:, i]) / int(n[i])
        if n_i == 0:
            continue
        K = {"paper": len(groups), "unbiased": K_i}[estimator]
        if K == 1:
            G = G + np.outer(S, S) / n_i
            continue
        a = (n_i - 1) / (K - 1)
        b = (n_i - K) / (n_i * (K - 1))
        if estimator == "paper":
            a, b = max(a, 0.0), max(b, 0.0)
        G = G + a * first - b * np.outer(S, S)
    return G


def stsa_e(tasks_of_groups, gamma, estimator):
    """Eq. 9, 4 and 10; tasks_of_groups: per task, (C (M, c_t), n (c_t,)) of every dummy client, empty ones included."""
    M = tasks_of_groups[0][0][0].shape[0]
    G, B, classifiers = np.zeros((M, M)), np.zeros((M, 0)), []
    for groups in tasks_of_groups:
        G = G + estimate_gram(groups, estimator)
        B = np.concatenate([B, sum(C for C, _ in groups)], axis=1)
        classifiers.append(np.linalg.solve(G + gamma * np.eye(M), B))
    return classifiers
