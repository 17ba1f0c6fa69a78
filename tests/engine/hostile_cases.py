"""The methods whose uploads are corrupted, as small as they come, with the knobs that change what travels."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from fcl_bench.engine.codec import decoded
from fcl_bench.engine.loop import Federation
from fcl_bench.methods.closed_form.base import ClosedFormMethod
from fcl_bench.methods.data_free.mfcl import Generation
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Method
from fcl_bench.protocol.wire import WireFormat
from fcl_bench.training.knobs import Training
from tests.methods.harness import context_of
from tests.methods.training_harness import feature_tasks, federation_of, image_tasks, tiny_context
from tests.small_methods import NAMES, architecture, class_of, made, trains_by_gradient

FAST = Training(rounds=2, epochs=1, batch_size=8, lr=0.05, augment="none")
SIZES = [[14, 9, 8], [8, 11, 7]]
#: Knobs that make the method small, and what changes its uploads.
KNOBS: dict[str, dict[str, Any]] = {
    "afl": {},
    "afcl": {},
    "fedncm": {},
    "fedfecam": {},
    "fedran": {"M": 8, "rank": 3},
    "stsa_e": {"M": 8, "dummy_clients": 2},
    "centred_sketch": {"M": 8, "rank": 2},
    "fot": {"training": FAST, "columns": 8},
    "fedprotip": {"training": FAST, "columns": 8},
    "mfcl": {"training": FAST, "synthetic": 4, "generator": Generation(noise=5, width=4, steps=2)},
}
#: More of the methods whose knobs change what travels.
MORE: list[tuple[str, dict[str, Any]]] = [
    ("afl", {"M": 8}),
    ("air", {"M": 8, "correction": "logits"}),
    ("centred_sketch", {"M": 8, "rank": 2, "remainder": "gaussian", "input_rank": 2, "input_remainder": "diagonal"}),
    ("fedfecam", {"covariance": "shared"}),
    ("fedklda", {"M": 8, "ensemble": 2}),
    ("fedlda", {"M": 8, "centre": "all_tasks"}),
    ("ranpac", {"M": 8, "ridge": "folds", "folds": 2}),
    ("fedicarl", {"training": FAST, "classify": "nme", "memory": 6}),
    ("fedprotip", {"training": FAST, "columns": 8, "sketch": 40}),
    ("fedavg", {"training": FAST, "ccvr": "gaussian"}),
    ("fot", {"training": FAST, "columns": 8, "share_of": "inputs"}),
    ("lorm", {"training": FAST, "alpha": 0.5}),
    ("regmean", {"training": FAST, "damping": 0.0}),
]
CASES = [(name, {}) for name in NAMES] + MORE
WIRES = {
    "float32": WireFormat(torch.float32),
    "float16, packed": WireFormat(torch.float16, gram="packed", columns="held", factors="int8"),
}
#: Fields that an honest client may leave out: gradients come with a signal only.
MAY_BE_LEFT_OUT = {("glfc", "gradients"), ("lga", "gradients")}


def small(name: str, **knobs: Any) -> Method:
    usual = (
        {"training": FAST}
        if trains_by_gradient(name)
        else {"M": 8}
        if issubclass(class_of(name), ClosedFormMethod)
        else {}
    )
    return made(name, **(knobs or KNOBS.get(name, usual)))


def federation(method: Method, wire: WireFormat = WIRES["float32"], drops: bool = False) -> Federation:
    if method.trains_network:
        context = tiny_context(architecture=architecture(method.name))
        tasks = image_tasks(np.random.default_rng(0), [3, 3], SIZES)
    else:
        context, tasks = context_of(6), feature_tasks(0, [3, 3], SIZES)
        if method.name == "fedfecam":  # whose power takes nothing negative
            tasks = [[(Z.abs(), labels) for Z, labels in clients] for clients in tasks]
    return federation_of(method, dataclasses.replace(context, wire=wire, clients=3), tasks, drops=drops)


def same_once_decoded(a: Message, b: Message) -> bool:
    one, other = (decoded(message, torch.float64) for message in (a, b))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def not_a_number(upload: Message) -> Message:
    """Every real number is none; of what has none, every count is below 0."""
    broken = {
        name: torch.full_like(value, torch.nan) if value.is_floating_point() else -value.abs() - 1
        for name, value in upload.items()
    }
    return dataclasses.replace(upload, tensors=broken, samples=None if upload.samples is None else 0)
