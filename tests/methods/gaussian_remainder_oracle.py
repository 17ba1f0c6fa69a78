"""The centred sketch with the Gaussian remainder in plain NumPy, float64: upload by upload, class by class, dense.

tasks: per task, per client, (Z (n, d), columns (n,)); P (d, M) or None.
"""

import numpy as np
from scipy.stats import norm


def sketch_of(X, labels, rank):
    """V, sigma of X minus its class means, the energy before truncation, and sum and count per class held."""
    A, sums, counts = X.copy(), {}, {}
    for c in sorted({int(label) for label in labels}):
        rows = labels == c
        sums[c], counts[c] = X[rows].sum(axis=0), int(rows.sum())
        A[rows] = X[rows] - sums[c] / counts[c]
    _, s, Vt = np.linalg.svd(A, full_matrices=False)
    keep = [i for i in range(min(rank, len(s))) if s[i] > 1e-12 * max(s[0], 1e-300)]
    return Vt[keep].T, s[keep], np.sum(A**2), sums, counts


def covariance_of_relu(P, Sigma, mu):
    """Mehler's series after order 2 with the exact diagonal, entry by entry where it is not a product."""
    M = P.shape[1]
    s = np.array([np.sqrt(max(P[:, i] @ Sigma @ P[:, i], 0)) for i in range(M)])
    Q = np.zeros((M, M))
    live = s > 0
    m = np.array([P[:, i] @ mu / s[i] if live[i] else 0.0 for i in range(M)])
    c1, c2 = s * norm.cdf(m), s * norm.pdf(m)
    cross = P.T @ Sigma @ P
    for i in range(M):
        for j in range(M):
            if i == j:
                Phi, phi = norm.cdf(m[i]), norm.pdf(m[i])
                Q[i, i] = s[i] ** 2 * ((m[i] ** 2 + 1) * Phi + m[i] * phi - (m[i] * Phi + phi) ** 2)
            elif live[i] and live[j]:
                rho = cross[i, j] / (s[i] * s[j])
                Q[i, j] = c1[i] * c1[j] * rho + c2[i] * c2[j] * rho**2 / 2
    return Q


def states(tasks, P, rank, input_rank, mix):
    """(G, B, terms) after each task: `terms`, of this task, are what each upload's rest was replaced by."""
    d = tasks[0][0][0].shape[1]
    M = d if P is None else P.shape[1]
    G, B, scatter, N, after = np.zeros((M, M)), np.zeros((M, 0)), np.zeros((d, d)), 0, []
    for clients in tasks:
        uploads, means, sizes = [], {}, {}
        for Z, labels in clients:
            if len(labels) == 0:
                continue
            H = Z if P is None else np.maximum(Z @ P, 0)
            C = max(B.shape[1], 1 + int(labels.max()))
            B = np.pad(B, ((0, 0), (0, C - B.shape[1]))) + H.T @ np.eye(C)[labels]
            V, sigma, energy, sums, counts = sketch_of(H, labels, rank)
            uploads.append((V, sigma, max(energy - np.sum(sigma**2), 0), sums, counts))
            U, omega, energy, sums, counts = sketch_of(Z, labels, rank if P is None else input_rank)
            k = len(omega)
            tau = max(energy - np.sum(omega**2), 0) / (d - k) if k < d else 0.0
            scatter = scatter + U @ np.diag(omega**2 - tau) @ U.T + tau * np.eye(d)
            N += len(labels)
            for c, total in sums.items():
                means[c], sizes[c] = means.get(c, 0) + total, sizes.get(c, 0) + counts[c]
        Sigma = scatter / N
        Q = Sigma
        if P is not None:
            Q = sum(sizes[c] * covariance_of_relu(P, Sigma, means[c] / sizes[c]) for c in means)
        terms = []
        for V, sigma, e, sums, counts in uploads:
            r = len(sigma)
            Pi = np.eye(M) - V @ V.T
            shape = Pi @ Q @ Pi
            even = Pi / (M - r) if r < M else np.zeros((M, M))
            known = np.trace(shape) > 1e-12 * np.trace(Q)
            term = e * ((1 - mix) * shape / np.trace(shape) + mix * even) if known else e * even
            terms.append(term)
            G = G + V @ np.diag(sigma**2) @ V.T + term
            for c, S in sums.items():
                G = G + np.outer(S, S) / counts[c]
        after.append((G, B, terms))
    return after


def gaussian_remainder(tasks, P, rank, input_rank, mix, ridge):
    """W = (G + ridge I)^-1 B after each task."""
    return [np.linalg.solve(G + ridge * np.eye(len(G)), B) for G, B, _ in states(tasks, P, rank, input_rank, mix)]
