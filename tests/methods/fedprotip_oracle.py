"""FedProTIP in plain NumPy, float64, written from the paper's equations alone (with erratum 3): slow and obvious.

A layer's weight is W (out, d); its activations are columns, A (d, m); a basis is Phi (d, q), orthonormal columns, q = 0
for none. Gradients and updates of W are (out, d): the projector acts on their rows.
"""

from collections import Counter

import numpy as np

# Activations ----------------------------------------------------------------------------------------------------------


def pair(value):
    return value if isinstance(value, tuple) else (value, value)


def output_size(size, kernel, stride, padding, dilation):
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def unfold(x, kernel, stride=1, padding=0, dilation=1):
    """One image x (C, H, W) as the columns a convolution sees: (C kh kw, positions), positions row by row."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = pair(kernel), pair(stride), pair(padding), pair(dilation)
    C, H, W = x.shape
    columns = []
    for row in range(output_size(H, kh, sh, ph, dh)):
        for column in range(output_size(W, kw, sw, pw, dw)):
            patch = []
            for c in range(C):
                for i in range(kh):
                    for j in range(kw):
                        h, w = row * sh - ph + i * dh, column * sw - pw + j * dw
                        patch.append(x[c, h, w] if 0 <= h < H and 0 <= w < W else 0.0)
            columns.append(patch)
    return np.array(columns, dtype=np.float64).reshape(len(columns), C * kh * kw).T


# Subspaces ------------------------------------------------------------------------------------------------------------


def projector(Phi):
    return Phi @ Phi.T


def complement(Phi):
    """P = I - Phi Phi' (Eq. 18)."""
    return np.eye(len(Phi)) - projector(Phi)


EPS = float(np.finfo(np.float64).eps)


def remaining_singular_values(A, Phi, eps=EPS):
    """Of A minus its part in Phi (Eq. 6), descending; those that are rounding of A (known to eps) are exactly 0."""
    if A.shape[1] == 0:
        return np.zeros(0)
    sigma = np.linalg.svd(complement(Phi) @ A, compute_uv=False)
    sigma[sigma <= 10 * max(A.shape) * eps * np.linalg.norm(A, 2)] = 0
    return sigma


def core_rank(sigma, threshold):
    """Eq. 8: the smallest r whose singular values hold the fraction `threshold` of the sum of all; 0 if all are 0."""
    positive = int(np.count_nonzero(sigma))
    for r in range(1, positive):
        if np.sum(sigma[:r]) / np.sum(sigma) >= threshold:
            return r
    return positive


def core_basis(A, Phi, threshold, eps=EPS):
    """Eq. 6-8: U (d, r) and its singular values (r,)."""
    if A.shape[1] == 0:
        return np.zeros((len(A), 0)), np.zeros(0)
    sigma = remaining_singular_values(A, Phi, eps)
    U = np.linalg.svd(complement(Phi) @ A, full_matrices=False)[0]
    r = core_rank(sigma, threshold)
    return U[:, :r], sigma[:r]


def core_basis_of_the_inputs(A, Phi, threshold):
    """GPM's rule: the smallest r with which Phi and the r directions hold `threshold` of A's squares."""
    held, whole = np.sum((Phi.T @ A) ** 2), np.sum(A**2)
    U, sigma, _ = np.linalg.svd(A - Phi @ (Phi.T @ A), full_matrices=False)
    r = 0
    while held / whole < threshold:
        held += sigma[r] ** 2
        r += 1
    return U[:, :r]


def core_basis_before_the_share(A, threshold):
    """Of the public code's first client: as many directions as hold less than `threshold` of A's squares."""
    U, sigma, _ = np.linalg.svd(A, full_matrices=False)
    return U[:, : np.sum(np.cumsum(sigma**2) / np.sum(sigma**2) < threshold)]


def leading(A, Phi, r):
    """The r leading directions of A outside Phi."""
    return np.linalg.svd(A - Phi @ (Phi.T @ A), full_matrices=False)[0][:, :r]


def span(B, tolerance=1e-10):
    """An orthonormal basis of the range of B; singular values below tolerance times the largest count as 0."""
    if B.shape[1] == 0 or not B.any():
        return np.zeros((len(B), 0))
    U, sigma, _ = np.linalg.svd(B, full_matrices=False)
    return U[:, sigma >= tolerance * sigma[0]]


def union(bases, tolerance=1e-10):
    """Proposition 1: what the server's basis has to span, whatever the order of the clients."""
    return span(np.concatenate(bases, axis=1), tolerance)


def append(Phi, U, tolerance=1e-10):
    """Eq. 9 for one client, one column after the other (Gram-Schmidt, each column twice)."""
    for u in U.T:
        rest = complement(Phi) @ u
        if np.linalg.norm(rest) < tolerance:
            continue
        rest = complement(Phi) @ (rest / np.linalg.norm(rest))
        Phi = np.concatenate([Phi, rest[:, None] / np.linalg.norm(rest)], axis=1)
    return Phi


def sketch(U, sigma, G):
    """Eq. 40; the server uses the sum over clients only."""
    return U @ np.diag(sigma) @ G


# Projected local training, aggregation --------------------------------------------------------------------------------


def softmax_gradient(W, X, labels, classes=None):
    """Of the mean cross entropy of logits X W', X (n, d); only `classes` (default: all) compete and get a gradient."""
    classes = list(range(len(W))) if classes is None else list(classes)
    gradient = np.zeros_like(W)
    for x, y in zip(X, labels, strict=True):
        logits = np.array([W[c] @ x for c in classes])
        p = np.exp(logits - logits.max())
        p = p / p.sum()
        for c, p_c in zip(classes, p, strict=True):
            gradient[c] += (p_c - (c == y)) * x / len(X)
    return gradient


def local_training(W, batches, Phi, lr, weight_decay=0.0, momentum=0.0, classes=None):
    """Eq. 4-5 with erratum 3: the step that is applied is projected, so weight decay and momentum are too.

    batches: (X (n, d), labels) in order; momentum starts at 0. Rows outside `classes` never move.
    """
    P, velocity = complement(Phi), np.zeros_like(W)
    trained = np.zeros((len(W), 1))
    trained[list(range(len(W))) if classes is None else list(classes)] = 1
    W = W.copy()
    for X, labels in batches:
        velocity = momentum * velocity + softmax_gradient(W, X, labels, classes) + weight_decay * W
        W = W - lr * trained * (velocity @ P)
    return W


def local_training_projecting_gradients_only(W, batches, Phi, lr, weight_decay=0.0, momentum=0.0):
    """What the paper's Eq. 4 becomes inside an ordinary optimiser: wrong as soon as there is weight decay."""
    P, velocity, W = complement(Phi), np.zeros_like(W), W.copy()
    for X, labels in batches:
        velocity = momentum * velocity + softmax_gradient(W, X, labels) @ P + weight_decay * W
        W = W - lr * velocity
    return W


def leak(W_new, W_old, Phi):
    """||(W_new - W_old) Phi|| / ||W_new - W_old||: 0 where the update is orthogonal to Phi."""
    change = np.linalg.norm(W_new - W_old)
    return 0.0 if change == 0 else np.linalg.norm((W_new - W_old) @ Phi) / change


def fedavg(models, counts):
    """sum_k p_k W_k, p_k = n_k / sum n (Algorithm 1, line 9); clients without data have no say."""
    total = sum(counts)
    W = np.zeros_like(models[0])
    for model, n in zip(models, counts, strict=True):
        if n > 0:
            W = W + (n / total) * model
    return W


def train_task(W, clients, Phi, rounds, lr, weight_decay=0.0, momentum=0.0, classes=None):
    """Algorithm 1, lines 3-10; clients: per client, its list of batches (the same in every round)."""
    for _ in range(rounds):
        models, counts = [], []
        for batches in clients:
            models.append(local_training(W, batches, Phi, lr, weight_decay, momentum, classes))
            counts.append(sum(len(X) for X, _ in batches))
        W = fedavg(models, counts)
    return W


# Assumptions 4 and 5 --------------------------------------------------------------------------------------------------


def surviving_fraction(gradient, bases):
    """||P g|| / ||g|| over all layers; gradient, bases: one (out, d), one Phi per layer. None for a zero gradient."""
    before = sum(np.sum(g**2) for g in gradient)
    after = sum(np.sum((g @ complement(Phi)) ** 2) for g, Phi in zip(gradient, bases, strict=True))
    return None if before == 0 else np.sqrt(after / before)


def rho(gradients, bases):
    """Assumption 4: the largest rho with ||P g||^2 >= rho ||g||^2 for all of the current task's gradients."""
    fractions = [surviving_fraction(g, bases) for g in gradients]
    return min([f**2 for f in fractions if f is not None], default=1.0)


def beta(gradients, bases):
    """Assumption 5: the smallest beta with ||P g|| <= beta ||g|| for all of the old task's gradients."""
    fractions = [surviving_fraction(g, bases) for g in gradients]
    return max([f for f in fractions if f is not None], default=0.0)


# Task identity --------------------------------------------------------------------------------------------------------


def relevance(A, bases):
    """Eq. 10; A (n, d): one row per sample."""
    omega = np.zeros((len(A), len(bases)))
    for i, a in enumerate(A):
        for t, U in enumerate(bases):
            omega[i, t] = np.linalg.norm(U @ (U.T @ a)) if U.shape[1] else 0.0
    return omega


def reference(A, bases, tasks):
    """The mean of omega over a client's samples, zeros for the tasks that come later: (tasks,)."""
    omega = relevance(A, bases).mean(axis=0)
    return np.concatenate([omega, np.zeros(tasks - len(omega))])


def cosine(a, b):
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    return 0.0 if lengths == 0 else float(a @ b) / lengths


def route_one(omega, references, known):
    """Eq. 11 for one sample: (task, margin); margin: how far the nearest comparison was from a tie (inf if none)."""
    T = len(omega)
    votes, sums, margin = Counter(), Counter(), np.inf
    for k in range(len(references)):
        competing = [tau for tau in range(T) if known[k][tau]]
        if not competing:
            continue
        similarity = {tau: cosine(omega, references[k][tau]) for tau in competing}
        for tau in competing:
            sums[tau] += similarity[tau]
        best = max(competing, key=lambda tau: (similarity[tau], -tau))
        margin = min([margin] + [similarity[best] - similarity[tau] for tau in competing if tau != best])
        votes[best] += 1
    most = max(votes.values())
    leaders = sorted(tau for tau in votes if votes[tau] == most)
    winner = max(leaders, key=lambda tau: (sums[tau], -tau))
    margin = min([margin] + [sums[winner] - sums[tau] for tau in leaders if tau != winner])
    return winner, margin


def route(omega, references, known):
    """Eq. 11: (tasks (n,), margins (n,))."""
    results = [route_one(row, references, known) for row in omega]
    return np.array([t for t, _ in results], dtype=np.int64), np.array([m for _, m in results])


# Task identity in the public code -------------------------------------------------------------------------------------


def batch_vector(A, bases):
    """Of a batch A (n, d): the norm of its projection on the subspace of each task but the first, as one vector."""
    return np.array([np.linalg.norm(A @ U @ U.T) for U in bases[1:]])


def batches_of(A, size):
    return [A[begin : begin + size] for begin in range(0, len(A), size)]


def route_batch(A, bases, inputs, size):
    """(task, margin): inputs[k][tau] are client k's final-layer inputs (n, d) of task tau; None where it has none.

    Similarity is the mean cosine with the vectors of the client's batches, and the clients vote. With two tasks the
    vectors have one entry, and its size decides.
    """
    a = batch_vector(A, bases)
    vectors = [
        {tau: [batch_vector(B, bases) for B in batches_of(X, size)] for tau, X in enumerate(of) if X is not None}
        for of in inputs
    ]
    if len(bases) == 2:
        first, second = (np.mean([np.mean(of[tau]) for of in vectors if tau in of]) for tau in (0, 1))
        middle = min(abs(a[0] - first), abs(a[0] - second), abs(abs(a[0] - first) - abs(a[0] - second)))
        if a[0] < first:
            return 0, middle
        if a[0] > second:
            return 1, middle
        return (0 if abs(first - a[0]) < abs(second - a[0]) else 1), middle
    votes, margin = Counter(), np.inf
    for of in vectors:
        similarity = {tau: np.mean([cosine(a, r) for r in rows]) for tau, rows in of.items()}
        ranked = sorted(similarity.values(), reverse=True)
        if len(ranked) > 1:
            margin = min(margin, ranked[0] - ranked[1])
        votes[max(similarity, key=similarity.get)] += 1
    leading = [count for _, count in votes.most_common(2)]
    return votes.most_common(1)[0][0], 0.0 if len(leading) > 1 and leading[0] == leading[1] else margin
