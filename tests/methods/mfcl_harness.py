"""MFCL with knobs that take no time, and its client in a second task."""

from __future__ import annotations

import numpy as np

from fcl_bench.methods.data_free.mfcl import MFCL, Generation
from fcl_bench.training.knobs import Training
from tests.methods.harness import turn
from tests.methods.training_harness import (
    image_shard,
    image_tasks,
    images_stream,
    learn_images,
    tiny_context,
)

#: Client 1 misses the second task, client 2 comes with it and has a single sample of the last.
SIZES = [[9, 6, 0], [8, 0, 7], [6, 6, 1]]
SMALL = {"noise": 5, "width": 4, "steps": 3, "batch_size": 8}


def training(**knobs) -> Training:
    return Training(**{"rounds": 2, "epochs": 1, "batch_size": 4, "lr": 0.05, "weighting": "uniform", **knobs})


def mfcl(generator: dict | None = None, knobs: dict | None = None, **own) -> MFCL:
    return MFCL(
        **{"training": training(**(knobs or {})), "synthetic": 6, **own},
        generator=Generation(**{**SMALL, **(generator or {})}),
    )


def tasks():
    return image_tasks(np.random.default_rng(0), [3, 2, 2], SIZES)


def second_task(method: MFCL, steps: int = 0):
    """A client's half in the second task (classes 3 and 4) with its objective and a batch; `steps` rounds later."""
    context, stream = tiny_context(), tasks()
    server, client = learn_images(method, context, stream[:1]), method.client(context)
    task = images_stream(stream)[1]
    server.start_task(task)
    client_data = image_shard(0, 1, *stream[1][0])
    for round_ in range(steps):
        broadcast = server.broadcast(task, round_)
        server.absorb(0, turn(client, client_data, broadcast))
        server.finish_round()
    broadcast = server.broadcast(task, steps)
    client.take_over(client_data, broadcast)
    return client, client_data, broadcast, client.objective(client_data, broadcast, {})


def softmax(q: np.ndarray) -> np.ndarray:
    e = np.exp(q - q.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def cross_entropy(q: np.ndarray, y: np.ndarray) -> float:
    return float(-np.log(softmax(q)[np.arange(len(y)), y]).mean())
