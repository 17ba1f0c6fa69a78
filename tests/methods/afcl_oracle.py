"""AFCL in plain NumPy, float64: the literal recursion with registration (Section 3, Eq. 2-10).

tasks: per task, per client, (X (n, d), columns (n,)). A client's batch at a task is one (virtual) client.
"""

import numpy as np


def unknown_classes(known, labels):
    """The classes that this client is the first to bring, in the order in which its samples show them."""
    unknown = []
    for label in labels:
        if int(label) not in known and int(label) not in unknown:
            unknown.append(int(label))
    return unknown


def encode(labels, classes):
    """Eq. 4: one column per class in `classes`; a sample of another class is a row of zeros."""
    Y = np.zeros((len(labels), len(classes)))
    for i, label in enumerate(labels):
        if int(label) in classes:
            Y[i, classes.index(int(label))] = 1
    return Y


def afcl(tasks, gamma, ridge):
    """W (d, C_t) after each task, columns in the common order, 0 for a class that nobody registered."""
    d = tasks[0][0][0].shape[1]
    known, GKM, G_agg, k, classifiers = [], np.zeros((d, 0)), np.zeros((d, d)), 0, []
    for clients in tasks:
        for X, labels in clients:
            if len(labels) == 0:
                continue
            unknown = unknown_classes(known, labels)
            # The client: Eq. 5, 6, 7.
            G_k = X.T @ X + gamma * np.eye(d)
            W_known = np.linalg.inv(G_k) @ X.T @ encode(labels, known)
            W_unknown = np.linalg.inv(G_k) @ X.T @ encode(labels, unknown)
            # The server: Eq. 8, 9.
            G_before, G_agg = G_agg, G_agg + G_k
            old = np.linalg.inv(G_agg) @ (G_before @ GKM + G_k @ W_known)
            new = np.linalg.inv(G_agg) @ G_k @ W_unknown
            GKM = np.concatenate([old, new], axis=1)
            known = known + unknown
            k = k + 1
        # Eq. 10.
        W = np.linalg.solve(G_agg - k * gamma * np.eye(d) + ridge * np.eye(d), G_agg @ GKM)
        common = np.zeros((d, 1 + max(known)))
        for column, label in enumerate(known):
            common[:, label] = W[:, column]
        classifiers.append(common)
    return classifiers
