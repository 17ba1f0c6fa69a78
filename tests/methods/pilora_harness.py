"""What the tests of PILoRA share: a tiny transformer, three clients and three tasks."""

from __future__ import annotations

import dataclasses

import numpy as np

from fcl_bench.methods.transformers.pilora import PILoRA
from fcl_bench.training.knobs import Training
from tests.methods.training_harness import image_tasks, tiny_context

#: Of the tiny transformer: d, and the rank of the updates.
D, R = 16, 2
SIZES = [[9, 6, 0], [8, 1, 7], [6, 6, 6]]
CLASSES = [3, 2, 2]


def training(**knobs) -> Training:
    usual = {"rounds": 2, "epochs": 1, "batch_size": 4, "optimizer": "adam", "lr": 0.01, "rates": {"heads": 0.05}}
    return Training(**{**usual, "augment": "none", "weight_decay": 1e-5, **knobs})


def pilora(**knobs) -> PILoRA:
    names = {field.name for field in dataclasses.fields(Training)}
    how = {name: knobs.pop(name) for name in list(knobs) if name in names}
    return PILoRA(training(**how), **{"rank": R, **knobs})


def context(**options):
    return tiny_context(width=D // 8, architecture="vit", **options)


def pictures(classes=CLASSES, sizes=SIZES):
    return image_tasks(np.random.default_rng(0), classes, sizes)
