"""Both halves of a method that trains, over a stream of small made-up images and a network of some thousand weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
import torch

from fcl_bench.backbones.tiny import Tiny
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import Dataset, image_split
from fcl_bench.data.splits.base import Stream
from fcl_bench.engine.codec import Middleware
from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.loop import Federation
from fcl_bench.engine.transport import Transport
from fcl_bench.engine.validation import OptionStep
from fcl_bench.execution.drift import FeatureDrift
from fcl_bench.options.tree.tree import Tree
from fcl_bench.protocol.context import WIRE_DTYPES, ClientData, Context, State, Task, WireFormat
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Method, Server
from fcl_bench.training.network import Network, feature_start
from tests.methods.harness import draw_tasks, on_wire, stream_of, take_in, turn

CPU = torch.device("cpu")

#: Per task and client, images (n, 3, size, size) uint8 and columns (n,) int64.
ImageTasks = list[list[tuple[torch.Tensor, torch.Tensor]]]
#: (client, broadcast, the upload on the wire)
Seen = Callable[[int, Message, Message], object]


def tiny_context(
    size: int = 8,
    width: int = 4,
    seed: int = 0,
    wire: str = "float32",
    dtype: torch.dtype = torch.float64,
    architecture: str = "conv",
) -> Context:
    """Of a `Tiny` network: 4 stages or, of architecture vit, 4 blocks; 8 `width` features."""
    split = image_split([0, 1], ArrayImages(np.zeros((2, size, size), dtype=np.uint8)))
    network = Tiny(width, size, architecture).trainable(Dataset("made", split, split), seed)
    return Context(network.dimension, seed, dtype, CPU, WireFormat(WIRE_DTYPES[wire]), network)


def image_tasks(
    rng: np.random.Generator, classes_per_task: list[int], per_client: list[list[int]], size: int = 8
) -> ImageTasks:
    """Each class is noise around an image of its own; every class of a task has a sample, if there are enough.

    Args:
        rng: of everything.
        classes_per_task: how many new classes each task brings.
        per_client: [task][client] -> samples; 0 for a client without any.
        size: of the images.
    """
    tasks: ImageTasks = []
    first = 0
    for classes, sizes in zip(classes_per_task, per_client, strict=True):
        labels = first + np.arange(sum(sizes)) % classes
        rng.shuffle(labels)
        centres = rng.integers(40, 216, (first + classes, 3, size, size))
        pixels = (centres[labels] + rng.integers(-40, 41, (len(labels), 3, size, size))).clip(0, 255)
        images = torch.from_numpy(pixels.astype(np.uint8)).split(sizes)
        tasks.append(list(zip(images, torch.from_numpy(labels).split(sizes), strict=True)))
        first += classes
    return tasks


def image_shard(client: int, task: int, images: torch.Tensor, labels: torch.Tensor) -> ClientData:
    return ClientData(client, task, images, labels, images[:0])


def learn_image_task(
    method: Method,
    context: Context,
    server: Server,
    task: Task,
    clients: list[tuple[torch.Tensor, torch.Tensor]],
    order: list[int] | None = None,
    seen: Seen = lambda *_: None,
    states: dict[int, State] | None = None,
) -> None:
    """One task, all rounds, as the engine does it.

    Args:
        method, context, server, task, clients: of the task.
        order: of the clients' turns.
        seen: looks at every exchange.
        states: of the clients, from task to task.
    """
    client, states = method.client(context), {} if states is None else states
    server.start_task(task)
    available = [k for k, (_, labels) in enumerate(clients) if len(labels)]
    for round_ in range(server.rounds(task)):
        present = server.participants(task, round_, available)
        broadcast = server.broadcast(task, round_)
        for k in present if order is None else [k for k in order if k in present]:
            upload = turn(client, image_shard(k, task.index, *clients[k]), broadcast, states, round_)
            sent = on_wire(upload, method, context)
            take_in(server, k, sent, task, round_)
            seen(k, broadcast, sent)
        server.finish_round()
    server.finish_task()


def learn_images(
    method: Method,
    context: Context,
    tasks: ImageTasks,
    order: list[int] | None = None,
    seen: Seen = lambda *_: None,
    after: Callable[[Task, Server], object] = lambda *_: None,
) -> Server:
    """The server at the end; `after` looks at it after each task."""
    server, states = method.server(context), {}
    for task, clients in zip(images_stream(tasks), tasks, strict=True):
        learn_image_task(method, context, server, task, clients, order, seen, states)
        after(task, server)
    return server


def images_stream(tasks: ImageTasks) -> list[Task]:
    """The tasks' columns."""
    return stream_of([[(images.numpy(), labels.numpy()) for images, labels in clients] for clients in tasks])


def feature_tasks(seed: int, classes_per_task: list[int], per_client: list[list[int]], inputs: int = 6) -> ImageTasks:
    """The same with features (n, inputs) in float64 in place of images, for the closed-form methods."""
    tasks = draw_tasks(np.random.default_rng(seed), inputs, classes_per_task, per_client)
    return [[(torch.from_numpy(Z), torch.from_numpy(labels)) for Z, labels in clients] for clients in tasks]


def federation_of(
    method: Method,
    context: Context,
    tasks: ImageTasks,
    drift: int = 0,
    unlabelled: Collection[tuple[int, int]] = (),
    transport: Callable[..., Transport] = InProcess.of,
    middleware: Sequence[Middleware] = (),
    evaluate_rounds: int = 0,
    drops: bool = False,
    fan_in: int | None = None,
    steps: Sequence[OptionStep] = (),
    kind: Callable[..., Federation] = Federation,
) -> Federation:
    """The engine over the tasks; they are tested on what they are trained on.

    Args:
        method, context, tasks: what is run.
        drift: reference samples per client and task; 0: no drift is measured.
        unlabelled: (task, client) of those who know no label.
        transport: makes one of what `InProcess.of` takes.
        middleware: of the server's side.
        evaluate_rounds: every so many rounds of the model are tested; 0: only tasks are.
        drops: whether bad uploads are left out.
        fan_in: of a tree between clients and server; None: there is none.
        steps: further ones of the exchange.
        kind: of the engine.
    """
    images, labels = (torch.cat([parts[i] for clients in tasks for parts in clients]) for i in (0, 1))
    shards, begin = [], 0
    for clients in tasks:
        ends = begin + np.cumsum([len(part) for _, part in clients])
        shards.append([np.arange(end - len(part), end) for end, (_, part) in zip(ends, clients, strict=True)])
        begin = int(ends[-1])
    samples = tuple(np.concatenate(clients) for clients in shards)
    stream = images_stream(tasks)
    order, columns = np.arange(stream[-1].columns_seen), labels.numpy()
    cut = Stream(tuple(stream), order, columns, columns, samples, samples)
    context = replace(context, recurring=cut.recurring)
    labelled = np.ones(len(labels), dtype=bool)
    for task, client in unlabelled:
        labelled[shards[task][client]] = False
    made = transport(method, context, shards, columns, labelled, images)
    measured = {"drift": FeatureDrift(drift, context.seed, shards)} if drift else {}
    audits = {**method.audits(context), **measured}
    if fan_in is not None:
        steps = [*steps, lambda accounting, validation: Tree(made.clients, fan_in, method, context, validation)]
    return kind(method, context, cut, made, images, audits, middleware, evaluate_rounds, drops, steps=steps)


def one_head(rng: np.random.Generator, classes: int) -> Network:
    """Class weights alone, drawn, on four features, in float64."""
    network = Network(feature_start(4))
    network.grow([classes], 0)
    network.double()
    with torch.no_grad():
        network.heads[0].weight.copy_(torch.from_numpy(rng.standard_normal((classes, 4))))
        network.heads[0].bias.copy_(torch.from_numpy(rng.standard_normal(classes)))
    return network
