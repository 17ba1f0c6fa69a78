"""FedSpace in plain NumPy float64, feature by feature, from the equations."""

from __future__ import annotations

import numpy as np


def cross_entropy(scores: np.ndarray, places: np.ndarray) -> float:
    """The mean over rows."""
    return float(np.mean([np.log(np.exp(own - own[c]).sum()) for own, c in zip(scores, places, strict=True)]))


def contrast(features: np.ndarray, labels: np.ndarray, now: set[int], tau: float) -> float:
    """R: an anchor of a class that the client has now, against every other feature."""
    N, total = len(features), 0.0
    z = features / np.linalg.norm(features, axis=1, keepdims=True)
    for i in range(N):
        alike = [j for j in range(N) if j != i and labels[j] == labels[i]]
        if labels[i] not in now or not alike:
            continue
        others = np.log(1 + sum(np.exp(z[i] @ z[j] / tau) for j in range(N) if j != i))
        total -= sum(z[i] @ z[j] / tau - others for j in alike) / len(alike)
    return total / N


def loss(W, b, Z, labels, own, made, contrasted, now, knobs) -> float:
    """CE + w_1 A + w_2 R.

    Args:
        W, b: (C, d) and (C,) the class weights.
        Z, labels: (b, d) and (b,) the batch.
        own: columns that compete in the batch's loss.
        made: features (m, d) of A and their classes (m,).
        contrasted: the same of R.
        now: the client's classes of the task.
        knobs: w_1, w_2, T, tau.
    """
    w_1, w_2, T, tau = knobs
    scores = (Z @ W.T + b) / T
    found = cross_entropy(scores[:, own], np.array([own.index(y) for y in labels]))
    found += w_1 * cross_entropy((made[0] @ W.T + b) / T, made[1])
    whole = np.concatenate([Z, contrasted[0]]), np.concatenate([labels, contrasted[1]])
    return found + w_2 * contrast(*whole, now, tau)


def drawn(rng, columns, means, radius: float, among: list[int], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Features and classes: `count` times a class of `among`, and then their noise, as `rng` gives them."""
    chosen = np.array(among)[rng.whole(len(among), count)]
    return means[chosen] + radius * rng.normal(count, means.shape[1]), np.array(columns)[chosen]


def radius(features: np.ndarray, labels: np.ndarray) -> float:
    traces = [np.trace(np.cov(features[labels == c].T)) for c in set(labels.tolist()) if (labels == c).sum() > 1]
    return float(np.sqrt(np.mean(traces) / features.shape[1])) if traces else 0.0


class Server:
    """Prototypes by class, the radius, and the model as one vector.

    Args:
        model: before the first round.
        eta, g: shares of the new.
    """

    def __init__(self, model: np.ndarray, eta: float, g: float) -> None:
        self.model, self.eta, self.g = model, eta, g
        self.prototypes: dict[int, np.ndarray] = {}
        self.radius = 0.0

    def round(self, clients: list[tuple[int, np.ndarray, float, dict[int, np.ndarray]]]) -> None:
        """Number of samples, model, radius and prototypes of each participant."""
        n = np.array([float(own[0]) for own in clients])
        mean = sum(own[0] * own[1] for own in clients) / n.sum()
        self.model = self.g * mean + (1 - self.g) * self.model
        self.radius = sum(own[0] * own[2] for own in clients) / n.sum()
        for c in {c for own in clients for c in own[3]}:
            holders = [own for own in clients if c in own[3]]
            new = sum(own[0] * own[3][c] for own in holders) / sum(own[0] for own in holders)
            before = self.prototypes.get(c, new)
            self.prototypes[c] = self.eta * new + (1 - self.eta) * before
