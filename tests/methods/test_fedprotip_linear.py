"""A whole FedProTIP federation on a linear network, against the NumPy oracle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from fcl_bench.data.images.batches import epoch_batches
from fcl_bench.methods.gradient.client import head_seed
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.methods.projection.task_identity import HeadRank, Tip
from fcl_bench.protocol.context import Context, TestBatch
from fcl_bench.protocol.method import Server
from fcl_bench.randomness import derived_seed
from fcl_bench.training.network import Network
from tests.methods import fedprotip_oracle as oracle
from tests.methods.fedprotip_harness import (
    HEADS,
    bases_of,
    fedprotip_of,
    linear_context,
    projector,
)
from tests.methods.training_harness import (
    image_tasks,
    learn_images,
)


def _step(gradient: np.ndarray, decay: np.ndarray, P: np.ndarray | None, projected_decay: bool) -> np.ndarray:
    """Gradient and weight decay, projected together or the gradient alone."""
    if P is None:
        return gradient + decay
    return (gradient + decay) @ P if projected_decay else gradient @ P + decay


@dataclass
class LinearOracle:
    """Algorithm 1 and TIP on the linear network, in NumPy and float64; of the library only seeds and batch order."""

    method: FedProTIP
    context: Context
    A: np.ndarray
    heads: list[np.ndarray] = field(default_factory=list)
    biases: list[np.ndarray] = field(default_factory=list)
    bases: dict[str, list[np.ndarray]] = field(default_factory=lambda: {"body.linear": [], HEADS: []})
    references: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    inputs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def pixels(self, images: torch.Tensor) -> np.ndarray:
        start = self.context.network
        scaled = images.double().numpy() / 255
        mean, std = (np.array(value).reshape(1, 3, 1, 1) for value in (start.mean, start.std))
        return ((scaled - mean) / std).reshape(len(images), -1)

    def known(self, layer: str) -> np.ndarray:
        d = self.A.shape[1] if layer == "body.linear" else self.A.shape[0]
        return np.concatenate([np.zeros((d, 0)), *self.bases[layer]], axis=1)

    def local(self, task: int, round_: int, client: int, X: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
        knobs, seed = self.method.training, derived_seed(self.context.seed, "training", task, round_, client)
        generator = torch.Generator().manual_seed(seed)
        first = sum(len(W) for W in self.heads[:-1])
        new = slice(first, first + len(self.heads[-1]))
        A, W, b = self.A.copy(), np.concatenate(self.heads), np.concatenate(self.biases)
        velocities = [np.zeros_like(value) for value in (A, W, b)]
        P, Q = oracle.complement(self.known("body.linear")), oracle.complement(self.known(HEADS))
        if not self.method.projected_heads:
            Q = np.eye(len(Q))
        trains = np.ones((len(W), 1))
        if self.method.frozen_heads:
            trains[:first] = 0
        for _ in range(knobs.epochs):
            for chosen in epoch_batches(len(X), knobs.batch_size, generator):
                x, y = X[chosen.numpy()], labels[chosen.numpy()]
                logits = x @ A.T @ W.T + b
                competing = np.zeros(len(W), dtype=bool)
                competing[new if self.method.loss_classes == "task" else slice(None)] = True
                p = np.where(competing, np.exp(logits - logits.max(axis=1, keepdims=True)), 0)
                G = (p / p.sum(axis=1, keepdims=True) - np.eye(len(W))[y]) / len(x)
                gradients = [(G @ W).T @ x, G.T @ (x @ A.T), G.sum(axis=0)]
                steps = [
                    _step(gradient, knobs.weight_decay * value, projector, self.method.projected_decay)
                    for gradient, value, projector in zip(gradients, (A, W, b), (P, Q, None), strict=True)
                ]
                for velocity, step in zip(velocities, steps, strict=True):
                    velocity *= knobs.momentum
                    velocity += step
                A = A - knobs.lr * velocities[0]
                W = W - knobs.lr * trains * velocities[1]
                if task == 0 or not self.method.projected_heads:
                    b = b - knobs.lr * trains[:, 0] * velocities[2]
        return [A, W, b]

    def learn(self, task: int, clients: list[tuple[torch.Tensor, torch.Tensor]], classes: int) -> None:
        network = Network(self.context.network)
        network.grow([len(W) for W in self.heads] + [classes], head_seed(self.context))
        self.heads.append(network.heads[task].weight.detach().double().numpy())
        self.biases.append(np.zeros(classes))
        data = {k: (self.pixels(images), labels.numpy()) for k, (images, labels) in enumerate(clients) if len(labels)}
        ends = np.cumsum([len(W) for W in self.heads])[:-1]
        for round_ in range(self.method.training.rounds):
            models = [self.local(task, round_, k, X, labels) for k, (X, labels) in data.items()]
            even = self.method.training.weighting == "uniform"
            counts = [1 if even else len(X) for X, _ in data.values()]
            self.A, W, b = (oracle.fedavg([model[part] for model in models], counts) for part in range(3))
            self.heads, self.biases = np.split(W, ends), np.split(b, ends)
        epsilon = self.method.threshold + self.method.threshold_step * task
        for layer, bases in self.bases.items():
            before = now = self.known(layer)
            for turn, (X, _) in enumerate(data.values()):
                columns = X if layer == "body.linear" else X @ self.A.T
                known = now if self.method.extension == "sequential" else before
                found = self.core(layer, columns.T, known, epsilon, task, turn)
                now = oracle.append(now, found, tolerance=1e-4)
            bases.append(now[:, before.shape[1] :])
        self.inputs |= {(k, task): X @ self.A.T for k, (X, _) in data.items()}
        for k, (X, _) in data.items():
            self.references[k, task] = oracle.reference(X @ self.A.T, self.bases[HEADS], task + 1)

    def core(self, layer: str, A: np.ndarray, known: np.ndarray, epsilon: float, task: int, turn: int) -> np.ndarray:
        """What a client adds."""
        method = self.method
        if layer == HEADS and method.head_rank is not None:
            others = method.head_rank.others // (self.context.clients - (task == 0))
            return oracle.leading(A, known, method.head_rank.first if (task, turn) == (0, 0) else others)
        if method.variant == "published" and not known.shape[1]:
            return oracle.core_basis_before_the_share(A, epsilon)
        if method.share_of == "inputs":
            return oracle.core_basis_of_the_inputs(A, known, epsilon)
        return oracle.core_basis(A, known, epsilon, eps=1e-6)[0]

    def classify(self, images: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores, tasks and how clear these are."""
        features, tasks = self.pixels(images) @ self.A.T, len(self.heads)
        clients = sorted({k for k, _ in self.references})
        references = np.zeros((len(clients), tasks, tasks))
        known = np.zeros((len(clients), tasks), dtype=bool)
        for (k, task), reference in self.references.items():
            references[clients.index(k), task, : task + 1] = reference
            known[clients.index(k), task] = True
        routed, margins = oracle.route(oracle.relevance(features, self.bases[HEADS]), references, known)
        return features @ np.concatenate(self.heads).T + np.concatenate(self.biases), routed, margins


def assert_close(ours: torch.Tensor, theirs: np.ndarray, tolerance: float = 1e-4) -> None:
    assert ours.shape == theirs.shape
    assert np.abs(ours.double().numpy() - theirs).max() <= tolerance * max(np.abs(theirs).max(), 1e-12)


def assert_same_model(server: Server, theirs: LinearOracle) -> None:
    """Weights and subspaces."""
    state = server.network.state_dict()
    assert_close(state["body.linear.weight"], theirs.A)
    for index, (W, b) in enumerate(zip(theirs.heads, theirs.biases, strict=True)):
        assert_close(state[f"heads.{index}.weight"], W)
        assert_close(state[f"heads.{index}.bias"], b)
    for layer, bases in bases_of(server).items():
        for ours, basis in zip(bases, theirs.bases[layer], strict=True):
            assert ours.shape == basis.shape
            np.testing.assert_allclose(projector([ours]), oracle.projector(basis), atol=1e-3)


LINEAR = {
    "default": {},
    "only the task's classes compete": {"loss_classes": "task"},
    "all heads train": {"frozen_heads": False},
    "low threshold, no step": {"threshold": 0.3, "threshold_step": 0.0},
    "wide sketches": {"sketch": 27},
    "heads train freely": {"projected_heads": False},
    "weight decay is free": {"projected_decay": False},
    "one client after the other": {"extension": "sequential"},
    "share of the inputs": {"share_of": "inputs", "mass": "energy", "threshold": 0.8},
}
#: Every choice of the public code that a linear network knows.
PUBLISHED = {
    "variant": "published", "projected_heads": False, "projected_decay": False, "extension": "sequential",
    "share_of": "inputs", "mass": "energy", "threshold": 0.8, "head_rank": HeadRank(3, 4), "loss_classes": "task",
    "tip": Tip(route="batch", batch=4, references="updated", rule="batches"),
}  # fmt: skip
SIZES = [[20, 16, 0], [17, 0, 18], [12, 15, 9]]


@pytest.mark.slow_cases(
    "default",
    "one client after the other",
    "only the task's classes compete",
    "share of the inputs",
    "weight decay is free",
    "wide sketches",
)
@pytest.mark.parametrize("knobs", LINEAR.values(), ids=LINEAR.keys())
def test_a_whole_federation_on_a_linear_network_is_the_oracles(knobs):
    """Three tasks and clients that miss some of them: weights, subspaces, references, routes and predictions."""
    context = replace(linear_context(wire="float64" if "sketch" in knobs else "float32"), clients=3)
    method = fedprotip_of({"lr": 0.02}, **{"frozen_stages": 0, "threshold_step": 0.05, **knobs})
    tasks = image_tasks(np.random.default_rng(3), [3, 2, 2], SIZES, size=3)
    theirs = LinearOracle(method, context, context.network.build().linear.weight.detach().double().numpy())
    tests = [torch.cat([images for images, _ in clients]) for clients in tasks]
    agreed = []

    def after(task, server):
        theirs.learn(task.index, tasks[task.index], len(task.new_columns))
        assert_same_model(server, theirs)
        references, known = server.votes()
        clients = sorted({k for k, _ in theirs.references})
        assert known.tolist() == [[(k, t) in theirs.references for t in range(task.index + 1)] for k in clients]
        for (k, t), reference in theirs.references.items():
            row = references[clients.index(k), t]
            assert_close(row[: t + 1], reference, 1e-3)
            assert not row[t + 1 :].any()
        for images in tests[: task.index + 1]:
            prediction = server.classify(TestBatch.of(images))
            scores, routed, margins = theirs.classify(images)
            assert_close(prediction.scores, scores, 1e-3)
            clear = margins > 1e-3
            assert prediction.tasks[torch.from_numpy(clear)].tolist() == routed[clear].tolist()
            agreed.extend(clear)

    server = learn_images(method, context, tasks, after=after)
    assert np.mean(agreed) > 0.8
    ranks = server.report()["ranks"]
    assert ranks["body.linear"][1] > 0
    assert ranks[HEADS][1] > 0


def test_a_whole_federation_by_the_public_codes_choices_is_the_oracles():
    """Weights, subspaces and the routes of whole batches, after one, two and three tasks."""
    context = replace(linear_context(), clients=3)
    method = fedprotip_of({"lr": 0.02, "weighting": "uniform"}, **{"frozen_stages": 0, **PUBLISHED})
    # As there, every client has samples of every task; in full batches, since ours are means and theirs are sums.
    tasks = image_tasks(np.random.default_rng(3), [3, 2, 2], [[20, 16, 8], [16, 8, 20], [12, 16, 12]], size=3)
    theirs = LinearOracle(method, context, context.network.build().linear.weight.detach().double().numpy())
    clear, ranks = {2: 0, 3: 0}, []

    def after(task, server):
        theirs.learn(task.index, tasks[task.index], len(task.new_columns))
        assert_same_model(server, theirs)
        ranks.append(theirs.bases[HEADS][-1].shape[1])
        T = task.index + 1
        inputs = [[theirs.inputs[k, t] for t in range(T)] for k in range(3)]
        tests = [torch.cat([images for images, _ in clients]) for clients in tasks[:T]]
        for images in [own[begin : begin + 4] for own in tests for begin in (0, 9, 21)]:
            prediction = server.classify(TestBatch.of(images, one_task=True))
            if T == 1:
                assert prediction.tasks.tolist() == [0] * 4
                continue
            routed, margin = oracle.route_batch(theirs.pixels(images) @ theirs.A.T, theirs.bases[HEADS], inputs, 4)
            if margin > 1e-3:
                clear[T] += 1
                assert prediction.tasks.tolist() == [routed] * 4

    learn_images(method, context, tasks, after=after)
    assert clear[2] >= 2
    assert clear[3] >= 3
    assert ranks == [3 + 2 + 2, 1 + 1 + 1, 2]  # all twelve, then
