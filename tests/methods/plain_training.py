"""Plain SGD with torch's own optimiser, the oracle of the methods that train, and short settings for them."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from fcl_bench.backbones.timm_backbone import Timm, Transform
from fcl_bench.data.images.batches import Augment, Standardise, epoch_batches
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import Dataset, image_split
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.protocol.context import Context
from fcl_bench.randomness import derived_seed
from fcl_bench.training.knobs import Training
from tests.methods.training_harness import (
    ImageTasks,
    image_tasks,
    tiny_context,
)

STAGE = ("0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var")
FAST = {"rounds": 2, "epochs": 1, "batch_size": 8, "lr": 0.05, "augment": "none"}


def fedavg(**knobs) -> FedAvg:
    """`training` knobs and the method's own."""
    own = {name: knobs.pop(name) for name in ("frozen_stages", "frozen_heads", "loss_classes") if name in knobs}
    return FedAvg(training=Training(**{**FAST, **knobs}), **own)


def made_tasks(sizes: list[list[int]], classes: int = 2, size: int = 8, seed: int = 0) -> ImageTasks:
    return image_tasks(np.random.default_rng(seed), [classes] * len(sizes), sizes, size)


def resnet_context() -> Context:
    split = image_split([0, 1], ArrayImages(np.zeros((2, 16, 16, 3), dtype=np.uint8)))
    transform = Transform(size=16, crop_pct=1.0, mean=[0.5, 0.4, 0.6], std=[0.25, 0.3, 0.2])
    backbone = Timm("test_resnet", pretrained=False, stem="cifar", transform=transform)
    network = backbone.trainable(Dataset("made", split, split), seed=1)
    return dataclasses.replace(tiny_context(), network=network, inputs=network.dimension)


def cloned(tensors) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in tensors.items()}


def state_of(server) -> dict[str, torch.Tensor]:
    return cloned(server.network.state())


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in first if not torch.equal(first[name], second[name])}


# The oracle: one network, torch's own SGD, no federation --------------------------------------------------------------


class Plain(torch.nn.Module):
    """A body and a head per task, as the first lines of any tutorial have it."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.body = context.network.build()
        self.heads = torch.nn.ModuleList()
        self.seed = derived_seed(context.seed, "heads") % 2**62

    def add_head(self, classes: int) -> None:
        head = torch.nn.Linear(self.dimension, classes)
        uniform = torch.rand(
            classes, self.dimension, generator=torch.Generator().manual_seed(self.seed + len(self.heads))
        )
        head.load_state_dict({"weight": (2 * uniform - 1) / self.dimension**0.5, "bias": torch.zeros(classes)})
        self.heads.append(head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.body(x)
        return torch.cat([head(features) for head in self.heads], dim=1)


def plainly(context: Context, knobs: Training, data: list, joint: bool = False) -> Plain:
    """SGD over each task's (images, labels), one client; joint: over all so far, from scratch at every task."""
    start = context.network
    augment, standardise = Augment(knobs.augment), Standardise(start.size, start.mean, start.std)
    model = Plain(context)
    sizes: list[int] = []
    for task, (images, labels) in enumerate(data):
        sizes.append(int(labels.max()) + 1 - sum(sizes))
        if joint:
            model = Plain(context)
            images, labels = (torch.cat([part[i] for part in data[: task + 1]]) for i in (0, 1))
        model.dimension = start.dimension
        while len(model.heads) < len(sizes):
            model.add_head(sizes[len(model.heads)])
        model.to(memory_format=torch.channels_last).train()
        for round_ in range(knobs.rounds):
            where = (task, round_) if joint else (task, round_, 0)
            generator = torch.Generator().manual_seed(derived_seed(context.seed, "training", *where))
            optimiser = torch.optim.SGD(
                model.parameters(), lr=knobs.rate(round_), momentum=knobs.momentum, weight_decay=knobs.weight_decay
            )
            for _ in range(knobs.epochs):
                for chosen in epoch_batches(len(images), knobs.batch_size, generator):
                    x = standardise(augment(images[chosen], generator))
                    optimiser.zero_grad()
                    torch.nn.functional.cross_entropy(model(x), labels[chosen]).backward()
                    optimiser.step()
    return model
