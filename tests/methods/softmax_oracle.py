"""Federated softmax regression in NumPy float64: FedAvg on features over a stream, with what a method adds to it.

Every step is on all samples of a client, so that the order of batches does not matter. Written from the equations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from fcl_bench.protocol.context import Context
from fcl_bench.randomness import derived_seed
from fcl_bench.training.knobs import Training
from tests.methods.plain_training import made_tasks
from tests.methods.training_harness import ImageTasks, feature_tasks, tiny_context
from tests.methods.whole_runs import feature_context

#: Two tasks of features: a client without samples in the first, one with a single one in the second.
TASKS = feature_tasks(0, [3, 3], [[20, 0, 9], [12, 15, 1]])


def setting(trains: str) -> tuple[Context, ImageTasks]:
    """A problem and its tasks."""
    if trains == "images":
        return tiny_context(), made_tasks([[9, 7, 8], [8, 6, 3]], classes=3)
    return feature_context(), TASKS


def whole_batches(**knobs) -> Training:
    """One batch of all samples, no augmentation."""
    usual = {"rounds": 3, "epochs": 2, "batch_size": 10_000, "lr": 0.3, "momentum": 0.5, "weight_decay": 0.01}
    return Training(**{**usual, "augment": "none", **knobs})


def small_batches(**knobs) -> Training:
    """Batches of some samples, so that their order matters."""
    return whole_batches(**{"rounds": 2, "batch_size": 4, "lr": 0.05, **knobs})


def softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def plain_shares(counts: np.ndarray) -> np.ndarray:
    """p_k of (K, C) counts."""
    return counts.sum(axis=1) / counts.sum()


@dataclass
class Oracle:
    """What `method.trains=features` should come to.

    Attributes:
        training: the knobs.
        over: `loss_classes`.
        term: (S, S0, Sj, y) -> (n, c) the gradient of what a method adds to each sample's loss, by the logits that
            compete: S of the model, S0 of the broadcast one, Sj of the client's last one (None in its first round;
            fewer columns where its heads were fewer), y the places of the labels.
        shares: (K, C_t) counts of the clients of a round -> (K,) weights that sum to 1.
    """

    training: Training
    over: str = "seen"
    term: Callable = lambda S, S0, Sj, y: 0.0
    shares: Callable[[np.ndarray], np.ndarray] = plain_shares
    last: dict[int, np.ndarray] = field(default_factory=dict)

    def run(self, context: Context, tasks: ImageTasks) -> np.ndarray:
        """(C, d + 1) class weights, the bias last."""
        knobs, d = self.training, context.inputs
        model, seen = np.zeros((0, d + 1)), 0
        for t, clients in enumerate(tasks):
            new = 1 + max(int(y.max()) for _, y in clients if len(y)) - seen
            draw = torch.Generator().manual_seed(derived_seed(context.seed, "heads") % 2**62 + t)
            head = (2 * torch.rand(new, d, generator=draw).double().numpy() - 1) / np.sqrt(d)
            model = np.vstack([model, np.hstack([head, np.zeros((new, 1))])])
            old, seen = seen, seen + new
            for round_ in range(knobs.rounds):
                made, counts = [], []
                for k, (X, y) in enumerate(clients):
                    if len(y):
                        Z = np.hstack([X.double().numpy(), np.ones((len(y), 1))])
                        made.append(self.local(model, Z, y.numpy(), k, old, knobs.rate(round_)))
                        counts.append(np.bincount(y.numpy() - old, minlength=new))
                model = np.tensordot(self.shares(np.array(counts)), np.array(made), axes=1)
        return model

    def local(self, sent: np.ndarray, Z: np.ndarray, y: np.ndarray, k: int, old: int, rate: float) -> np.ndarray:
        first = old if self.over == "task" else 0
        w, velocity, y = sent.copy(), np.zeros_like(sent), y - first
        S0 = Z @ sent[first:].T
        Sj = Z @ self.last[k][first:].T if k in self.last else None
        for _ in range(self.training.epochs):
            S = Z @ w[first:].T
            by_score = (softmax(S) - np.eye(S.shape[1])[y] + self.term(S, S0, Sj, y)) / len(y)
            gradient = self.training.weight_decay * w
            gradient[first:] += by_score.T @ Z
            velocity = self.training.momentum * velocity + gradient
            w = w - rate * velocity
        self.last[k] = w
        return w


def class_weights(federation) -> np.ndarray:
    """(C, d + 1) of a federation on features, as `Oracle.run` returns them."""
    heads = federation.server.network.heads
    return np.vstack(
        [np.hstack([h.weight.detach().numpy(), h.bias.detach().numpy()[:, None]]).astype(np.float64) for h in heads]
    )
