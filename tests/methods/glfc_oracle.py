"""GLFC on class weights over fixed features, written down from the equations sample by sample, in NumPy in float64."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np


def sigma(q: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.asarray(q, dtype=float)))


def weights(q: np.ndarray, y: Sequence[int], learnt: Collection[int]) -> np.ndarray:
    """w of logits (b, C) and labels (b,)."""
    if not learnt:
        return np.ones(len(y))
    g = [abs(float(sigma(q[i][y[i]])) - 1) for i in range(len(y))]
    found = []
    for i in range(len(y)):
        group = [g[j] for j in range(len(y)) if (y[j] in learnt) == (y[i] in learnt)]
        found.append(g[i] / (sum(group) / len(group)))
    return np.array(found)


def bce(q: float, target: float) -> float:
    return -target * np.log(sigma(q)) - (1 - target) * np.log(1 - sigma(q))


def loss(q: np.ndarray, y: Sequence[int], learnt: Collection[int], old: np.ndarray | None) -> float:
    """L of logits q (b, C), and old ones (b, |O|)."""
    (rows, columns), w = q.shape, weights(q, y, learnt)
    places = [(i, c) for i in range(rows) for c in range(columns)]
    current = sum(w[i] * bce(q[i, c], float(y[i] == c)) for i, c in places) / q.size
    if old is None:
        return current
    target = lambda i, c: float(sigma(old[i, c])) if c < old.shape[1] else float(y[i] == c)  # noqa: E731
    return 0.5 * current + 0.5 * sum(bce(q[i, c], target(i, c)) for i, c in places) / q.size


def gradient(q: np.ndarray, y: Sequence[int], learnt: Collection[int], old: np.ndarray | None) -> np.ndarray:
    """dL/dq (b, C); no gradient goes through w."""
    hard = np.eye(q.shape[1])[list(y)]
    current = weights(q, y, learnt)[:, None] * (sigma(q) - hard)
    if old is None:
        return current / q.size
    soft = hard.copy()
    soft[:, : old.shape[1]] = sigma(old)
    return (0.5 * current + 0.5 * (sigma(q) - soft)) / q.size


def herding(Z: np.ndarray, count: int) -> list[int]:
    phi = Z / np.linalg.norm(Z, axis=1, keepdims=True)
    mean, order = phi.mean(axis=0), []
    while len(order) < min(count, len(phi)):
        total = phi[order].sum(axis=0)
        distances = np.linalg.norm(mean - (total + phi) / (len(order) + 1), axis=1)
        distances[order] = np.inf
        order.append(int(distances.argmin()))
    return order


@dataclass
class Keeper:
    """A client: the classes of its current task, those that it learnt in earlier ones, and its exemplars."""

    current: set[int] = field(default_factory=set)
    learnt: set[int] = field(default_factory=set)
    kept: dict[int, np.ndarray] = field(default_factory=dict)


@dataclass
class Plain:
    """Federated averaging by whole-batch gradient descent; `signal: boundary`, `proxy: none`."""

    memory: int
    lr: float = 0.1
    momentum: float = 0.5
    decay: float = 1e-3
    rounds: int = 2
    epochs: int = 3

    def learn(self, tasks: list, heads: list[np.ndarray]) -> list[np.ndarray]:
        """A (C, d + 1) after each task, biases last; `heads` are the first weights (c, d + 1) of new classes."""
        keepers = [Keeper() for _ in tasks[0]]
        A, found = np.zeros((0, heads[0].shape[1])), []
        for task, clients in enumerate(tasks):
            old = A if task else None
            A = np.vstack([A, heads[task]])
            present = [(keeper, Z, y) for keeper, (Z, y) in zip(keepers, clients, strict=True) if len(y)]
            for keeper, _, y in present:
                keeper.learnt |= keeper.current
                keeper.current = set(y.tolist())
            for _ in range(self.rounds):
                models = [self.train(A, keeper, Z, y, old) for keeper, Z, y in present]
                A = sum(n * model for n, model in models) / sum(n for n, _ in models)
            for keeper, Z, y in present:
                self.keep(keeper, Z, y)
            found.append(A.copy())
        return found

    def train(self, A: np.ndarray, keeper: Keeper, Z: np.ndarray, y: np.ndarray, old: np.ndarray | None):
        for column, kept in sorted(keeper.kept.items()):
            Z, y = np.vstack([Z, kept]), np.concatenate([y, np.full(len(kept), column)])
        X, velocity = np.hstack([Z, np.ones((len(Z), 1))]), 0.0
        taught = None if old is None else X @ old.T
        for _ in range(self.epochs):
            slope = gradient(X @ A.T, y, keeper.learnt, taught).T @ X + self.decay * A
            velocity = self.momentum * velocity + slope
            A = A - self.lr * velocity
        return len(y), A

    def keep(self, keeper: Keeper, Z: np.ndarray, y: np.ndarray) -> None:
        candidates = dict(keeper.kept)
        for column in set(y.tolist()):
            before = candidates.get(column, Z[:0])
            candidates[column] = np.vstack([before, Z[y == column]])
        share = self.memory // len(candidates)
        for column, samples in candidates.items():
            order = herding(samples, share) if column in y else list(range(min(share, len(samples))))
            keeper.kept[column] = samples[order]
