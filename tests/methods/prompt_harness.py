"""What the tests of prompt methods share: small streams, a ViT of some thousand weights, and byte counts."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import torch

from fcl_bench.engine.ledger import Upload
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.protocol.context import Context
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Network
from tests.methods.training_harness import federation_of, image_tasks, tiny_context
from tests.methods.whole_runs import learnt

#: Client 1 misses the second task, client 2 comes with it and has a single sample of the last.
SIZES = [[11, 9, 0], [10, 0, 8], [9, 7, 1]]
#: Numbers of a token.
D = 16


def training(**knobs) -> Training:
    small = {"rounds": 2, "epochs": 1, "batch_size": 8, "optimizer": "adam", "lr": 0.01, "weight_decay": 0.0}
    return Training(**{**small, "augment": "none", **knobs})


def context(**options) -> Context:
    return tiny_context(width=D // 8, architecture="vit", **options)


def pictures(seed: int = 0, recurring: bool = False):
    """Three tasks of images; recurring: the second and third have a class of the one before."""
    tasks = image_tasks(np.random.default_rng(seed), [3, 2, 2], SIZES)
    if recurring:
        tasks = [[(images, labels - task) for images, labels in clients] for task, clients in enumerate(tasks)]
    return tasks


def run_of(method: GradientMethod, tasks=None):
    """The engine after the whole stream."""
    return learnt(method, context(), pictures() if tasks is None else tasks)


def fresh(method: GradientMethod, tasks=None):
    return federation_of(method, context(), pictures() if tasks is None else tasks)


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.numpy().tobytes()).hexdigest()


def exchanges(found) -> list[Upload]:
    """The ledger's rows of clients that took part, without seconds."""
    return [dataclasses.replace(row, client_seconds=0.0) for row in found.state.ledger.uploads if row.samples]


class FrozenFineTune(FedAvg):
    """Heads alone on the same ViT, which is frozen: a prompt method without a prompt."""

    def build_network(self, context: Context) -> Network:
        network = super().build_network(context)
        network.put_body(network.body.requires_grad_(False))
        return network


def heads_alone(**knobs) -> FrozenFineTune:
    return FrozenFineTune(training(**knobs), loss_classes="task", frozen_heads=True)
