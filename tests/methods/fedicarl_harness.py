"""FediCaRL on three clients and three tasks: what its tests share."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from fcl_bench.methods.exemplars.fedicarl import FediCaRL, FediCaRLClient
from fcl_bench.protocol.context import Context
from fcl_bench.training.knobs import Training
from tests.methods.training_harness import feature_tasks, federation_of, image_tasks, tiny_context
from tests.methods.whole_runs import feature_context

CLASSES = [2, 2, 2]
#: Client 2 misses the first task, client 1 the second, client 0 the last.
SIZES = [[14, 9, 0], [12, 0, 11], [0, 8, 9]]
CLIENTS = 3


def training(**knobs) -> Training:
    return Training(**{"rounds": 2, "epochs": 1, "batch_size": 6, "lr": 0.05, "momentum": 0.5, **knobs})


def fedicarl(**knobs) -> FediCaRL:
    return FediCaRL(**{"training": training(), "memory": 8, "classify": "softmax", **knobs})


def context_on(trains: str, **options) -> Context:
    made_on = {"images": tiny_context, "features": feature_context}[trains]
    return dataclasses.replace(made_on(**options), clients=CLIENTS)


def tasks_on(trains: str, sizes=None):
    sizes = SIZES if sizes is None else sizes
    if trains == "features":
        return feature_tasks(0, CLASSES[: len(sizes)], sizes)
    return image_tasks(np.random.default_rng(0), CLASSES[: len(sizes)], sizes)


def made(method, trains: str = "images", sizes=None, **options):
    return federation_of(method, context_on(trains, **options), tasks_on(trains, sizes))


def learnt(method, trains: str = "images", sizes=None, after=lambda _: None, **options):
    federation = made(method, trains, sizes, **options)
    federation.run(after)
    return federation


def kept_by(federation, client: int) -> dict[int, torch.Tensor]:
    """The lists of a client by class."""
    states = federation.transport.state_dict()
    mine = {name.split(".")[2]: value for name, value in states.items() if name.startswith(f"{client}.")}
    return {int(column): value for column, value in sorted(mine.items(), key=lambda entry: int(entry[0]))}


def rows(samples: torch.Tensor) -> Counter:
    """How often each sample is there."""
    return Counter(row.float().numpy().tobytes() for row in samples)


def trained_on(monkeypatch) -> list:
    """(task, round, client, inputs, labels) of every round of the model, filled while a federation runs."""
    seen, samples = [], FediCaRLClient.samples

    def noted(self, client_data, broadcast, state):
        found = samples(self, client_data, broadcast, state)
        seen.append(
            (client_data.task, int(broadcast["round"]), client_data.client, found.inputs.clone(), found.labels.clone())
        )
        return found

    monkeypatch.setattr(FediCaRLClient, "samples", noted)
    return seen


def plain_directions(federation, samples: torch.Tensor) -> np.ndarray:
    phi = federation.server.embed(samples).double().numpy()
    return phi / np.linalg.norm(phi, axis=1, keepdims=True)


both = pytest.mark.parametrize("trains", ["images", "features"])
