"""FedRanPAC in plain NumPy, float64, on the samples themselves.

tasks: per task, per client, (Z (n, d), columns (n,)); P (d, M) or None. The folds are by the documented hash, written
here with NumPy's unsigned integers.
"""

import numpy as np

from fcl_bench.randomness import generator

GRID = [10.0**k for k in range(-8, 9)]


def features(Z, P):
    return Z if P is None else np.maximum(Z @ P, 0)


def folds_of(Z, seed, folds):
    """The upper half of sum_j a_j x_j modulo 2^64, modulo F; x_j are the bits of float32(z_j), sign-extended."""
    odd = generator(seed, "folds").integers(-(2**62), 2**62, Z.shape[1]) * 2 + 1
    found = []
    for z in Z:
        total = 0
        for a, x in zip(odd.tolist(), (z.astype(np.float32) + np.float32(0)).view(np.int32).tolist(), strict=True):
            total = (total + a * x) % 2**64
        found.append((total >> 33) % 2**31 % folds)
    return np.array(found, dtype=np.int64)


def pooled(tasks):
    """All samples of these tasks in one place."""
    parts = [part for clients in tasks for part in clients]
    return np.concatenate([Z for Z, _ in parts]), np.concatenate([labels for _, labels in parts]).astype(np.int64)


def ridge_regression(H, Y, ridge):
    return np.linalg.solve(H.T @ H + ridge * np.eye(H.shape[1]), H.T @ Y)


def cross_validation(H, Y, fold, held_out, grid):
    """Squared errors of each candidate, summed over the folds in `held_out`, each predicted from all other samples."""
    errors = []
    for ridge in grid:
        total = 0.0
        for number in held_out:
            held = fold == number
            residual = Y[held] - H[held] @ ridge_regression(H[~held], Y[~held], ridge)
            total += (residual**2).sum()
        errors.append(total)
    return np.array(errors)


def gcv_scores(H, Y, grid):
    """N RSS / (N - df)^2 from the residuals and the hat matrix."""
    scores = []
    for ridge in grid:
        hat = H @ np.linalg.solve(H.T @ H + ridge * np.eye(H.shape[1]), H.T)
        scores.append(len(H) * ((Y - hat @ Y) ** 2).sum() / (len(H) - np.trace(hat)) ** 2)
    return np.array(scores)


def leave_one_out(H, Y, grid):
    """Mean squared error of each sample predicted from all others, by as many fits as there are samples."""
    fold = np.arange(len(H))
    return cross_validation(H, Y, fold, fold, grid) / len(H)


def ranpac(tasks, P, selection, seed=0, scope="all", grid=GRID):
    """Per task (lambda, W): chosen on the samples of all tasks so far or of the task, fitted on all tasks so far."""
    found = []
    for t in range(len(tasks)):
        Z, labels = pooled(tasks[: t + 1])
        classes = 1 + labels.max()
        seen, looked_at = (features(Z, P), np.eye(classes)[labels]), (Z, labels)
        if scope == "task":
            looked_at = pooled(tasks[t : t + 1])
        H, Y = features(looked_at[0], P), np.eye(classes)[looked_at[1]]
        if selection == "gcv":
            errors = gcv_scores(H, Y, grid)
        else:
            errors = cross_validation(H, Y, folds_of(looked_at[0], seed, 5), [0], grid)
        ridge = grid[int(errors.argmin())]
        found.append((ridge, ridge_regression(*seen, ridge)))
    return found
