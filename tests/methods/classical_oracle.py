"""FedEWC and FedLwF on class weights over fixed features, written down from the equations in NumPy, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def fisher_sum(X: np.ndarray, labels: np.ndarray, A: np.ndarray, competing: np.ndarray) -> np.ndarray:
    """sum_x (d log p(y|x) / dA)^2 of the classes' weights A (C, d + 1), one sample after the other."""
    total = np.zeros_like(A)
    for x, label in zip(X, labels, strict=True):
        p = np.zeros(len(A))
        p[competing] = softmax((A[competing] @ x)[None])[0]
        gradient = np.outer((np.arange(len(A)) == label) - p, x) * np.isin(np.arange(len(A)), competing)[:, None]
        total += gradient**2
    return total


@dataclass
class Classical:
    """Federated averaging of softmax regression by whole-batch gradient descent, with a penalty or a teacher.

    Attributes:
        lr, momentum, decay, rounds, epochs: of training; `over`: "seen" or "task".
        ewc: lambda; with gamma, normalise (each task's information to a maximum of 1) and most, the bound of F.
        lwf: lambda; with T.
    """

    lr: float = 0.1
    momentum: float = 0.0
    decay: float = 0.0
    rounds: int = 2
    epochs: int = 3
    over: str = "seen"
    ewc: float = 0.0
    gamma: float = 1.0
    most: float = np.inf
    normalise: bool = False
    lwf: float = 0.0
    T: float = 2.0
    A: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    F: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))

    def learn(self, tasks: list, heads: list[np.ndarray]) -> list[np.ndarray]:
        """A (C, d + 1) after each task, biases last; `heads` are the first weights (c, d + 1) of new classes."""
        found = []
        self.A = np.zeros((0, heads[0].shape[1]))
        for task, clients in enumerate(tasks):
            data = [(np.hstack([Z, np.ones((len(Z), 1))]), labels) for Z, labels in clients if len(labels)]
            present = np.unique(np.concatenate([labels for _, labels in data]))
            old, F = self.A.copy(), self.F.copy()
            self.A = np.vstack([self.A, heads[task]])
            competing = np.arange(len(self.A)) if self.over == "seen" else present
            for _ in range(self.rounds):
                models = [(len(y), self.train(X, y, competing, old, F)) for X, y in data]
                self.A = sum(n * model for n, model in models) / sum(n for n, _ in models)
            if self.ewc:
                new = sum(fisher_sum(X, y, self.A, competing) for X, y in data)
                self.F = new / sum(len(y) for _, y in data)
                if self.normalise:
                    self.F /= self.F.max()
                if task:
                    self.F[: len(F)] += self.gamma * F
                self.F = np.minimum(self.F, self.most)
            found.append(self.A.copy())
        return found

    def train(self, X, y, competing, old, F):
        A, velocity = self.A.copy(), 0.0
        for _ in range(self.epochs):
            scores, before = X @ A.T, X @ old.T
            G = np.zeros_like(scores)
            G[:, competing] = softmax(scores[:, competing])
            G[np.arange(len(y)), y] -= 1
            if self.lwf and len(old):
                wanted = softmax(before / self.T)
                G[:, : len(old)] += self.lwf / self.T * (softmax(scores[:, : len(old)] / self.T) - wanted)
            gradient = G.T @ X / len(y) + self.decay * A
            if self.ewc and len(old):
                gradient[: len(old)] += self.ewc * F * (A[: len(old)] - old)
            velocity = self.momentum * velocity + gradient
            A = A - self.lr * velocity
        return A
