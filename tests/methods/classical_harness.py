"""What the tests of FedEWC and FedLwF share: small streams, whole runs of them, and comparisons."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.protocol.context import Context
from fcl_bench.training.knobs import Training
from tests.methods.classical_oracle import Classical
from tests.methods.harness import draw_tasks
from tests.methods.training_harness import federation_of, image_tasks, images_stream, learn_images, tiny_context
from tests.methods.whole_runs import feature_context

#: Client 1 misses the second task, client 2 comes with it and has a single sample of the last.
SIZES = [[14, 9, 0], [12, 0, 8], [9, 7, 1]]
#: Numbers of a feature.
INPUTS = 5


def training(**knobs) -> Training:
    small = {"rounds": 2, "epochs": 1, "batch_size": 8, "lr": 0.05, "momentum": 0.5, "weight_decay": 1e-3}
    return Training(**{**small, "augment": "none", **knobs})


def feature_tasks(recurring: bool = False, inputs: int = INPUTS, seed: int = 0):
    """Three tasks of features; recurring: the second and third have a class of the one before."""
    tasks = draw_tasks(np.random.default_rng(seed), inputs, [3, 2, 2], SIZES)
    if recurring:
        tasks = [[(Z, labels - task) for Z, labels in clients] for task, clients in enumerate(tasks)]
    return [[(torch.from_numpy(Z), torch.from_numpy(labels)) for Z, labels in clients] for clients in tasks]


def pictures(seed: int = 0):
    return image_tasks(np.random.default_rng(seed), [3, 2, 2], SIZES)


#: The streams of the comparisons with finetuning, by what methods train on.
STREAMS = {"images": (tiny_context, pictures), "features": (lambda: feature_context(INPUTS), feature_tasks)}


def federation(method: GradientMethod, tasks=None, context: Context | None = None):
    """The engine after the whole stream."""
    context_of, stream = STREAMS[method.trains]
    found = federation_of(method, context or context_of(), stream() if tasks is None else tasks)
    found.run(lambda _: None)
    return found


def exchanged(found) -> list[tuple]:
    """The ledger's rows, without seconds."""
    return [dataclasses.replace(row, client_seconds=0.0) for row in found.state.ledger.uploads]


def assert_as_written_down(method: GradientMethod, oracle: Classical, recurring: bool) -> None:
    """Both halves on features against the oracle, after every task, to float32's rounding."""
    tasks, context, found = feature_tasks(recurring), feature_context(INPUTS), []

    def after(_, server):
        state = server.network.state_dict()
        parts = [[state[f"heads.{h}.weight"], state[f"heads.{h}.bias"][:, None]] for h in range(len(server.columns))]
        found.append(torch.cat([torch.cat(part, dim=1) for part in parts]).double().numpy())

    learn_images(method, context, tasks, after=after)
    start = method.server(context)
    for task in images_stream(tasks):
        start.start_task(task)
    heads = [torch.cat([h.weight, h.bias[:, None]], 1).detach().double().numpy() for h in start.network.heads]
    expected = oracle.learn([[(Z.numpy(), y.numpy()) for Z, y in clients] for clients in tasks], heads)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
