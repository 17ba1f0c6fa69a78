"""AFL in plain NumPy, float64, written from the paper's equations; Eq. 8 and 10 with the sign that holds.

tasks: per task, per client, (X (n, d), columns (n,)). Every function returns W (d, C_t) per task. The clients of a
later task are further clients of the same single round, with zero columns added for its new classes.
"""

import numpy as np


def one_hot(labels, classes):
    return np.eye(classes)[labels]


def local(X, Y, gamma):
    """Eq. 13 and 15: W_k^r and C_k^r."""
    C = X.T @ X + gamma * np.eye(X.shape[1])
    return np.linalg.solve(C, X.T @ Y), C


def weights_as_printed(C_u, C_v):
    """Eq. 8, as the paper prints it (wrong: see `weights`)."""
    eye, R_u, R_v, R = np.eye(len(C_u)), np.linalg.inv(C_u), np.linalg.inv(C_v), np.linalg.inv(C_u + C_v)
    return eye - R_u @ C_v - R_u @ C_v @ R @ C_v, eye - R_v @ C_u - R_v @ C_u @ R @ C_u


def weights(C_u, C_v):
    """Eq. 8 with its last sign turned, in the form that also serves C_u = 0: (C_u + C_v)^-1 C_u and (...)^-1 C_v."""
    return np.linalg.solve(C_u + C_v, C_u), np.linalg.solve(C_u + C_v, C_v)


def remove_regulariser(C_agg, Q, K, gamma):
    """Eq. 16: (C_agg^r - K gamma I)^-1 Q with Q = C_agg^r W_agg^r; Moore-Penrose where that matrix is singular."""
    C = C_agg - K * gamma * np.eye(len(C_agg))
    C = (C + C.T) / 2
    eigenvalues = np.linalg.eigvalsh(C)
    if eigenvalues[0] <= 1e-10 * eigenvalues[-1]:
        return np.linalg.pinv(C, rcond=1e-10, hermitian=True) @ Q
    return np.linalg.solve(C, Q)


def afl_pairwise(tasks, gamma, ri=True):
    """Algorithm 1: Eq. 9-11 client by client, then Eq. 16 with the number of clients so far."""
    d = tasks[0][0][0].shape[1]
    W_agg, C_agg, K, classifiers = np.zeros((d, 0)), np.zeros((d, d)), 0, []
    for clients in tasks:
        for X, labels in clients:
            if len(labels) == 0:
                continue
            classes = max(W_agg.shape[1], 1 + int(labels.max()))
            W_agg = np.pad(W_agg, ((0, 0), (0, classes - W_agg.shape[1])))
            W_k, C_k = local(X, one_hot(labels, classes), gamma)
            weight_agg, weight_k = weights(C_agg, C_k)
            W_agg = weight_agg @ W_agg + weight_k @ W_k
            C_agg = C_agg + C_k
            K = K + 1
        classifiers.append(remove_regulariser(C_agg, C_agg @ W_agg, K, gamma) if ri else W_agg)
    return classifiers


def afl_running_sum(tasks, gamma, ri=True):
    """What Eq. 9-11 come to: C_agg W_agg = sum_k C_k^r W_k^r, solved once per task."""
    d = tasks[0][0][0].shape[1]
    Q, C_agg, K, classifiers = np.zeros((d, 0)), np.zeros((d, d)), 0, []
    for clients in tasks:
        for X, labels in clients:
            if len(labels) == 0:
                continue
            classes = max(Q.shape[1], 1 + int(labels.max()))
            Q = np.pad(Q, ((0, 0), (0, classes - Q.shape[1])))
            W_k, C_k = local(X, one_hot(labels, classes), gamma)
            Q = Q + C_k @ W_k
            C_agg = C_agg + C_k
            K = K + 1
        classifiers.append(remove_regulariser(C_agg, Q, K, gamma) if ri else np.linalg.solve(C_agg, Q))
    return classifiers


def moore_penrose(tasks, P=None):
    """Eq. 4 on all the data so far: the least-squares W of smallest norm."""
    classifiers = []
    for t in range(len(tasks)):
        parts = [part for clients in tasks[: t + 1] for part in clients]
        X = np.concatenate([X for X, _ in parts])
        H = X if P is None else np.maximum(X @ P, 0)
        labels = np.concatenate([labels for _, labels in parts]).astype(np.int64)
        classifiers.append(np.linalg.lstsq(H, one_hot(labels, 1 + int(labels.max())), rcond=None)[0])
    return classifiers
