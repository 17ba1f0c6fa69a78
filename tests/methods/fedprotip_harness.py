"""FedProTIP on small networks: settings, and everything that both halves say to each other."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from fcl_bench.backbones.backbone import Trainable, copies
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.methods.projection.projected import basis_name
from fcl_bench.protocol.context import WIRE_DTYPES, Context, WireFormat
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Server
from fcl_bench.randomness import seeded
from fcl_bench.training.knobs import Training
from tests.methods import fedprotip_oracle as oracle
from tests.methods.training_harness import (
    CPU,
    ImageTasks,
    image_tasks,
    images_stream,
    learn_image_task,
)

HEADS = "heads"
SMALL = (
    *("data=digits", "backbone=tiny", "backbone.width=4", "tasks=3", "clients=3", "method=fedprotip"),
    *("method.training.rounds=2", "method.training.epochs=1", "method.training.augment=none", "method.frozen_stages=1"),
)


def training(**knobs) -> Training:
    """Everything that can pull an update out of the projection: momentum and a heavy weight decay, over many steps."""
    hard = {"rounds": 2, "epochs": 3, "batch_size": 8, "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-2}
    return Training(**{**hard, "augment": "none", **knobs})


def fedprotip_of(knobs: dict | None = None, **own) -> FedProTIP:
    return FedProTIP(
        training=training(**(knobs or {})), **{"frozen_stages": 1, "threshold": 0.5, "projected_heads": True, **own}
    )


def three_tasks(seed: int = 0) -> ImageTasks:
    """Client 1 misses the second task, client 2 comes with it and has a single sample of the last."""
    sizes = [[30, 24, 0], [24, 0, 20], [16, 21, 1]]
    return image_tasks(np.random.default_rng(seed), [3, 2, 2], sizes)


def stage_of(message: Message) -> str:
    """What an upload is of."""
    return message.stage


def phi(broadcast: Message, layer: str) -> np.ndarray | None:
    """Phi^(1:t-1) of a layer as the client got it, from the names on the wire."""
    found = {name.split(".")[1]: name for name in broadcast if name.startswith("basis.") and name.endswith(f".{layer}")}
    if not found:
        return None
    return torch.cat([broadcast[found[task]] for task in sorted(found, key=int)], dim=1).double().numpy()


def layer_of(name: str) -> str:
    """The layer whose inputs a weight's rows meet."""
    return HEADS if name.startswith(f"{HEADS}.") else name.removesuffix(".weight")


def rows(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().flatten(1).numpy()


def copy_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state.items()}


@dataclass
class Observed:
    """Updates of weights with a basis, as (task, name, leak): each client's, and those of the average."""

    clients: list[tuple[int, str, float]] = field(default_factory=list)
    averages: list[tuple[int, str, float]] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    uploads: dict[tuple[int, str, int], Message] = field(default_factory=dict)
    projected: set[str] = field(default_factory=set)
    server: Server | None = None


def observed(method: FedProTIP, context: Context, tasks: ImageTasks) -> Observed:
    """A whole stream, and how far every update was from orthogonal to the bases that the client had."""
    result = Observed()
    server = result.server = method.server(context)
    for task, clients in zip(images_stream(tasks), tasks, strict=True):
        model: dict[str, tuple[torch.Tensor, np.ndarray]] = {}

        def seen(k, broadcast, message, task=task, model=model):
            result.uploads[task.index, stage_of(message), k] = message
            prefix = "" if "rate" in broadcast else f"final.{task.index}."
            names = [
                name for name in broadcast if name.endswith("weight") and phi(broadcast, layer_of(name)) is not None
            ]
            for name in names:
                old, Phi = rows(broadcast[name]), phi(broadcast, layer_of(name))
                if stage_of(message) == "model" and name in message:
                    result.projected.add(name)
                    result.clients.append((task.index, name, oracle.leak(rows(message[name]), old, Phi)))
            # The round before, against the model that this round starts from.
            for name, (old, Phi) in model.items():
                if (new := broadcast.get(prefix + name)) is not None:
                    result.averages.append((task.index, name, oracle.leak(rows(new), rows(old), Phi)))
            model.clear()
            if stage_of(message) == "model":
                model.update({name: (broadcast[name], phi(broadcast, layer_of(name))) for name in names})

        learn_image_task(method, context, server, task, clients, seen=seen)
        result.states.append(copy_of(server.network.state_dict()))
    return result


def bases_of(server: Server) -> dict[str, list[torch.Tensor]]:
    """By layer, the basis (d_l, r_t) of each task that has begun."""
    layers = server.widths()
    return {layer: [server.bases[basis_name(task, layer)] for task in range(len(server.tasks))] for layer in layers}


def projector(bases) -> np.ndarray:
    basis = torch.cat(list(bases), dim=1).double().numpy()
    return oracle.projector(basis)


def linear_context(
    size: int = 3, features: int = 12, wire: str = "float32", weight: torch.Tensor | None = None, **look
) -> Context:
    """A network without a nonlinearity: pixels times a matrix; the heads follow."""
    with seeded(1):
        body = nn.Sequential(OrderedDict(flatten=nn.Flatten(), linear=nn.Linear(3 * size * size, features, bias=False)))
    if weight is not None:
        body.linear.weight.data.copy_(weight)
    look = {"mean": (0.5,) * 3, "std": (0.25,) * 3, **look}
    start = Trainable("linear", copies(body), features, size, stages=("linear",), identity={}, **look)
    return Context(features, 0, torch.float64, CPU, WireFormat(WIRE_DTYPES[wire]), start)
