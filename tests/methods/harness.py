"""Both halves of a method over a stream of NumPy arrays, for the tests of all methods."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from fcl_bench.engine.codec import Codec, decoded, encoded
from fcl_bench.engine.exchange import Arrival
from fcl_bench.engine.validation import validate_upload
from fcl_bench.protocol.context import WIRE_DTYPES, ClientData, Context, State, Task, WireFormat
from fcl_bench.protocol.fields import Uploads
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Client, Method, Server

CPU = torch.device("cpu")

#: Per task and client, features (n, d) and columns (n,).
Tasks = list[list[tuple[np.ndarray, np.ndarray]]]


def context_of(inputs: int, seed: int = 0, wire: str = "float64", **options: str) -> Context:
    return Context(inputs, seed, torch.float64, CPU, WireFormat(WIRE_DTYPES[wire], **options))


def shard_of(
    client: int, task: int, Z: np.ndarray, labels: np.ndarray, unlabelled: np.ndarray | None = None
) -> ClientData:
    unlabelled = Z[:0] if unlabelled is None else unlabelled
    return ClientData(client, task, *map(torch.from_numpy, (Z, labels, unlabelled)))


def draw_tasks(
    rng: np.random.Generator, inputs: int, classes_per_task: list[int], sizes: list[list[int]], offset: float = 0.0
) -> Tasks:
    """Every class of a task has a sample somewhere; `sizes` are the clients' samples."""
    tasks: Tasks = []
    first = 0
    for classes, clients in zip(classes_per_task, sizes, strict=True):
        labels = first + rng.integers(0, classes, sum(clients))
        labels[:classes] = first + np.arange(classes)
        rng.shuffle(labels)
        centres = 2 * rng.standard_normal((first + classes, inputs))
        Z = centres[labels] + rng.standard_normal((len(labels), inputs)) + offset
        ends = np.cumsum(clients)[:-1]
        tasks.append(list(zip(np.split(Z, ends), np.split(labels, ends), strict=True)))
        first += classes
    return tasks


def random_tasks(seed: int, first: int) -> Tasks:
    """A few tasks of 8 features: client 0 has `first` samples, others none, one, few or many."""
    rng = np.random.default_rng(seed)
    tasks, clients = int(rng.integers(1, 4)), int(rng.integers(1, 8))
    sizes = rng.choice([0, 1, 5, 40], size=(tasks, clients))
    sizes[:, 0] = first
    return draw_tasks(rng, 8, [int(c) for c in rng.integers(1, 6, tasks)], sizes.tolist(), rng.choice([0.0, 2.0]))


def dealt(rng: np.random.Generator, tasks: Tasks, clients: int, beta: float) -> Tasks:
    """Each task's samples dealt to `clients` clients in any order, each class by a Dirichlet law of its own."""
    streams = []
    for task in tasks:
        Z, labels = (np.concatenate(parts) for parts in zip(*task, strict=True))
        shares = {label: rng.dirichlet(np.full(clients, beta)) for label in np.unique(labels)}
        owner = np.array([rng.choice(clients, p=shares[label]) for label in labels])
        streams.append([(Z[owner == k], labels[owner == k]) for k in rng.permutation(clients)])
    return streams


def stream_of(tasks: Tasks) -> list[Task]:
    """The tasks' columns: each task's new classes are those above all earlier ones; others come back."""
    seen, stream = 0, []
    for t, clients in enumerate(tasks):
        end = 1 + max([seen - 1, *(int(labels.max()) for _, labels in clients if len(labels))])
        present = {int(label) for _, labels in clients for label in labels}
        stream.append(Task(t, range(seen, end), end, tuple(sorted(present | set(range(seen, end))))))
        seen = end
    return stream


def turn(
    client: Client, client_data: ClientData, broadcast: Message, states: dict[int, State] | None = None, round_: int = 0
) -> Message:
    """One client's upload, as the engine gets it from the method; `states` of the clients between their turns."""
    states = {} if states is None else states
    upload, states[client_data.client] = client.update(client_data, broadcast, states.get(client_data.client, {}))
    return dataclasses.replace(upload, stage=broadcast.stage, task=client_data.task, round=round_)


def on_wire(upload: Message, method: Method, context: Context) -> Message:
    """The upload as it travels."""
    return encoded(upload, context.wire, Uploads.of(method, context))


def over_the_wire(upload: Message, method: Method, context: Context) -> Message:
    """What the server computes with."""
    return decoded(on_wire(upload, method, context), context.dtype, context.device)


def take_in(server: Server, client: int, sent: Message, task: Task, round_: int = 0) -> None:
    """What the engine does with an upload as it came from the wire: nothing is absorbed that is not expected."""
    context = server.context
    codec = Codec(Uploads.of(server.method, context), None, context.dtype, context.device)
    server.absorb(client, validate_upload(Arrival(client, sent), server.schema(task, sent.stage), codec, server))


def learn_task(method: Method, context: Context, server: Server, task: Task, clients, order=None) -> None:
    """One task, all rounds; `order` of the clients' turns."""
    client, states = method.client(context), {}
    server.start_task(task)
    for round_ in range(server.rounds(task)):
        broadcast = server.broadcast(task, round_)
        for k in range(len(clients)) if order is None else order:
            Z, labels = clients[k]
            if len(labels):
                upload = turn(client, shard_of(k, task.index, Z, labels), broadcast, states, round_)
                take_in(server, k, encoded(upload, context.wire, Uploads.of(method, context)), task, round_)
        server.finish_round()
    server.finish_task()


def learn(method: Method, context: Context, tasks: Tasks) -> tuple[Server, list[torch.Tensor]]:
    """The server at the end, and the classifier after each task."""
    server, classifiers = method.server(context), []
    for task, clients in zip(stream_of(tasks), tasks, strict=True):
        learn_task(method, context, server, task, clients)
        classifiers.append(server.model()["W"].clone())
    return server, classifiers


def projection_of(server: Server) -> np.ndarray | None:
    projection = server.model().get("projection")
    return None if projection is None else projection.numpy()


def relative_error(ours: torch.Tensor, theirs: np.ndarray) -> float:
    """Largest difference over the largest entry."""
    return float(np.abs(ours.numpy() - theirs).max() / np.abs(theirs).max())
