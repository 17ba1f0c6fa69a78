"""FedNCM, FedLDA and FedKLDA in plain NumPy, float64, on all data in one place: no sums of products, no clients.

tasks: per task, per client, (Z (n, d), columns (n,)). Every function returns, per task, what the data so far give.
"""

import numpy as np


def pooled(tasks):
    """Per task, all samples so far: (Z (n, d), labels (n,))."""
    for t in range(len(tasks)):
        parts = [part for clients in tasks[: t + 1] for part in clients]
        yield np.concatenate([Z for Z, _ in parts]), np.concatenate([own for _, own in parts]).astype(int)


def means_of(H, labels):
    """mu (M, C), every class of which has a sample."""
    return np.stack([H[labels == c].mean(axis=0) for c in range(labels.max() + 1)], axis=1)


def scatter_of(H, labels):
    """sum_c sum_i (h_i - mu_c)(h_i - mu_c)', from the deviations themselves."""
    A = H - means_of(H, labels).T[labels]
    return A.T @ A


def oas(Sigma, samples):
    """Chen et al. 2010, Eq. 23: the share of tr(Sigma) / M I."""
    M = len(Sigma)
    square, trace = np.trace(Sigma @ Sigma), np.trace(Sigma)
    share = ((1 - 2 / M) * square + trace**2) / ((samples + 1 - 2 / M) * (square - trace**2 / M))
    return min(share, 1.0)


def lda(H, labels, shrinkage=1e-4, prior="uniform"):
    """W (M, C) and b (C,) of h."""
    n = np.bincount(labels)
    mu = means_of(H, labels)
    Sigma = scatter_of(H, labels) / (len(H) - len(n))
    M = len(Sigma)
    share, level = (oas(Sigma, len(H)), np.trace(Sigma) / M) if shrinkage == "oas" else (shrinkage, 1.0)
    W = np.linalg.solve((1 - share) * Sigma + share * level * np.eye(M), mu)
    log_prior = -np.log(len(n)) if prior == "uniform" else np.log(n / n.sum())
    return W, -0.5 * np.sum(mu * W, axis=0) + log_prior


def ncm(H, labels, X, similarity):
    """Scores (m, C) of X, from the angles or the distances themselves."""
    mu = means_of(H, labels)
    if similarity == "euclid":
        distance = ((X[:, :, None] - mu[None]) ** 2).sum(axis=1)
        return ((X**2).sum(axis=1, keepdims=True) - distance) / 2
    return (X @ mu) / np.linalg.norm(X, axis=1)[:, None] / np.linalg.norm(mu, axis=0)


def fourier(Z, Omega, u):
    """sqrt(2/M) cos(Z Omega + u)."""
    return np.sqrt(2 / len(u)) * np.cos(Z @ Omega + u)


def mean_squared_distance(Z):
    """Over all pairs, a sample and itself included."""
    return ((Z[:, None] - Z[None]) ** 2).sum(axis=2).mean()


def softmax(scores):
    e = np.exp(scores - scores.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def slda(X, labels, size):
    """Deep_SLDA's update as its authors coded it: each deviation weighs N/(N+1) by the count of all samples."""
    mean, seen, Sigma = np.zeros((size, X.shape[1])), np.zeros(size), np.ones((X.shape[1], X.shape[1]))
    for N, (x, c) in enumerate(zip(X, labels, strict=True)):
        Sigma = (N * Sigma + np.outer(x - mean[c], x - mean[c]) * N / (N + 1)) / (N + 1)
        seen[c] += 1
        mean[c] += (x - mean[c]) / seen[c]
    return Sigma


def slda_mended(X, labels, size):
    """The same recursion with the weight n_c / (n_c + 1)."""
    mean, seen, Sigma = np.zeros((size, X.shape[1])), np.zeros(size), np.zeros((X.shape[1], X.shape[1]))
    for N, (x, c) in enumerate(zip(X, labels, strict=True)):
        Sigma = (N * Sigma + np.outer(x - mean[c], x - mean[c]) * seen[c] / (seen[c] + 1)) / (N + 1)
        seen[c] += 1
        mean[c] += (x - mean[c]) / seen[c]
    return Sigma
