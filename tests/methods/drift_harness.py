"""What the tests of FedProx, FedDyn and SCAFFOLD share: rounds one by one, scalar quadratics, an oracle in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from fcl_bench.data.images.batches import epoch_batches
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.protocol.context import Context, State, Task
from fcl_bench.randomness import derived_seed
from fcl_bench.training.knobs import Training
from tests.methods.harness import on_wire, take_in, turn
from tests.methods.training_harness import ImageTasks, image_shard, images_stream
from tests.methods.whole_runs import feature_context

#: Samples of each client in each task; one has none, another one each time.
COUNTS = [[12, 7, 0, 9], [9, 0, 8, 5], [6, 10, 7, 0]]
SMALL = {"rounds": 3, "epochs": 2, "batch_size": 5, "lr": 0.05, "augment": "none", "weighting": "uniform"}
#: f_k(w) = a_k / 2 (w - b_k)^2 of two clients.
A, B = (1.0, 3.0), (0.0, 4.0)
#: Local training that solves a quadratic in one round, to float32.
EXACT = {"epochs": 30, "batch_size": 64, "lr": 0.45, "weight_decay": 0.0, "augment": "none"}


def rounds_of(
    method: GradientMethod, context: Context, tasks: ImageTasks, seen: Callable = lambda *_: None
) -> Iterator[tuple[Task, int, GradientServer, dict[int, State], list[int]]]:
    """After each round: task, round, server, all clients' states, participants. `seen` looks at every exchange."""
    server, client, states = method.server(context), method.client(context), {}
    for task, clients in zip(images_stream(tasks), tasks, strict=True):
        server.start_task(task)
        available = [k for k, (_, labels) in enumerate(clients) if len(labels)]
        for round_ in range(server.rounds(task)):
            present = server.participants(task, round_, available)
            broadcast = server.broadcast(task, round_)
            for k in present:
                upload = turn(client, image_shard(k, task.index, *clients[k]), broadcast, states, round_)
                sent = on_wire(upload, method, context)
                take_in(server, k, sent, task, round_)
                seen(k, broadcast, sent)
            server.finish_round()
            yield task, round_, server, states, present
        server.finish_task()


# Scalar quadratics, through the real halves: the network is one weight ------------------------------------------------


def with_loss(method: type[GradientMethod], loss: Callable[[int, torch.Tensor], torch.Tensor]) -> type[GradientMethod]:
    """The method with clients whose loss is `loss(client, w)` of the head's one weight; all else is its own."""

    class Client(method.client_half):
        def objective(self, client_data, broadcast, state):
            made = super().objective(client_data, broadcast, state)

            def of_weight(objective, network, inputs, labels):
                return loss(client_data.client, network.heads[0].weight[0, 0])

            made.__class__ = type("Scalar", (type(made),), {"loss": of_weight})
            return made

    return type("Scalar", (method,), {"client_half": Client})


def quadratic(client: int, w: torch.Tensor) -> torch.Tensor:
    return A[client] / 2 * (w - B[client]) ** 2


def play_scalar(method: GradientMethod, sizes: tuple[int, int] = (2, 2)):
    """The server and the clients' states after all rounds."""
    clients = [(torch.ones(n, 1, dtype=torch.float64), torch.zeros(n, dtype=torch.int64)) for n in sizes]
    *_, (_, _, server, states, _) = rounds_of(method, feature_context(1), [clients])
    return server, states


def weight_of(server: GradientServer) -> float:
    return float(server.network.heads[0].weight.detach())


# Softmax regression in NumPy: theta (C, d + 1), the last column the bias ----------------------------------------------


def theta_of(tensors, heads: int, prefix: str = "") -> np.ndarray:
    """Weights and biases of the first `heads` heads, in float64."""
    parts = [(tensors[f"{prefix}heads.{h}.weight"], tensors[f"{prefix}heads.{h}.bias"]) for h in range(heads)]
    return np.concatenate([torch.cat([W, b[:, None]], dim=1).double().numpy() for W, b in parts])


def padded(theta: np.ndarray | None, like: np.ndarray) -> np.ndarray:
    """`theta` with zeros for the classes that are new in `like`."""
    whole = np.zeros_like(like)
    if theta is not None:
        whole[: len(theta)] = theta
    return whole


def loss_gradient(theta: np.ndarray, X: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean cross-entropy and its gradient."""
    Z = np.hstack([X, np.ones((len(X), 1))])
    scores = Z @ theta.T
    scores -= scores.max(axis=1, keepdims=True)
    P = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    loss = -np.log(P[np.arange(len(y)), y]).mean()
    P[np.arange(len(y)), y] -= 1
    return float(loss), P.T @ Z / len(y)


def train_locally(
    start: np.ndarray,
    X: np.ndarray,
    y: np.ndarray,
    knobs: Training,
    where: tuple[int, int, int],
    changed: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> tuple[np.ndarray, int]:
    """The weights after a client's round, and its number of steps.

    Args:
        start: w0.
        X, y: its samples.
        knobs: epochs, batch size, step size, momentum, weight decay.
        where: task, round, client: only the order of the batches is taken from the code that is tested.
        changed: (gradient with weight decay, w) -> the direction of the step.
    """
    generator = torch.Generator().manual_seed(derived_seed(0, "training", *where))
    w, velocity, steps = start.copy(), np.zeros_like(start), 0
    for _ in range(knobs.epochs):
        for chosen in epoch_batches(len(y), knobs.batch_size, generator):
            _, g = loss_gradient(w, X[chosen.numpy()], y[chosen.numpy()])
            velocity = knobs.momentum * velocity + changed(g + knobs.weight_decay * w, w)
            w = w - knobs.lr * velocity
            steps += 1
    return w, steps
