"""Every method of conf/method and one from outside of the repository, small, in runs of small clients."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fcl_bench.engine.codec import decoded
from fcl_bench.engine.loop import Federation
from fcl_bench.methods.closed_form.base import ClosedFormMethod
from fcl_bench.methods.data_free.mfcl import Generation
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.protocol.context import Context, WireFormat
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Method
from fcl_bench.training.knobs import Training
from tests.conftest import METHOD_VARIABLE
from tests.methods.training_harness import ImageTasks, feature_tasks, federation_of, image_tasks, tiny_context
from tests.methods.whole_runs import feature_context
from tests.own_methods import WRITTEN
from tests.small_methods import NAMES, architecture, class_of, made

FAST = Training(rounds=2, epochs=1, batch_size=8, lr=0.05, augment="none")
#: A step for each of a client's epochs: those of transformers are dear.
ONE_STEP = dataclasses.replace(FAST, batch_size=16)
#: Knobs that make the method small.
KNOBS: dict[str, dict[str, Any]] = {
    "afl": {},
    "centralised_softmax": {"iterations": 40},
    **{name: {"training": ONE_STEP} for name in ("coda_prompt", "cprompt", "dualprompt", "l2p", "lorm", "pilora")},
    "afcl": {},
    "fedncm": {},
    "fedfecam": {},
    "fedran": {"M": 8, "rank": 3},
    "stsa_e": {"M": 8, "dummy_clients": 2},
    "centred_sketch": {"M": 8, "rank": 2},
    "gaussian_sketch": {"M": 8, "rank": 2, "class_rank": 2},
    "fot": {"training": FAST, "columns": 8},
    "fedprotip": {"training": FAST, "columns": 8},
    "mfcl": {"training": FAST, "synthetic": 4, "generator": Generation(noise=5, width=4, steps=2)},
}
OUTSIDE = "from outside"
EVERY = [*NAMES, OUTSIDE]
CLASSES = [3, 3]
FLOAT32 = WireFormat(torch.float32)
COMPACT = WireFormat(torch.float16, gram="packed", columns="held", factors="int8")
#: Knobs with which a method sends something else.
MORE: list[tuple[str, dict[str, Any]]] = [
    ("afl", {"M": 8}),
    ("air", {"correction": "logits"}),
    ("fedklda", {"ensemble": 2}),
    ("ranpac", {"ridge": "held_out"}),
    ("fedicarl", {"classify": "nme", "memory": 6}),
    ("fedprotip", {"columns": 8, "sketch": 40}),
    ("fedavg", {"ccvr": "gaussian"}),
    ("fot", {"columns": 8, "share_of": "inputs"}),
    ("lorm", {"alpha": 0.5}),
    ("regmean", {"damping": 0.0}),
]
#: Fields that an honest client may leave out: gradients come with a signal only.
MAY_BE_LEFT_OUT = {("glfc", "gradients"), ("lga", "gradients")}
SIZES = [[9, 7, 8], [8, 9, 0]]


def method_of(name: str, **knobs: Any) -> Method:
    """The method with few features, rounds and samples, and these knobs."""
    if name not in NAMES:
        return from_outside()
    return made(name, **{**KNOBS.get(name, small_knobs(class_of(name))), **knobs})


def small_knobs(kind: type[Method]) -> dict[str, Any]:
    if issubclass(kind, GradientMethod):
        return {"training": FAST}
    return {"M": 8} if issubclass(kind, ClosedFormMethod) else {}


def from_outside() -> Method:
    """The method that `--fcl-method` names; else the one that `fcl-bench new` writes."""
    if named := os.environ.get(METHOD_VARIABLE):
        path, _, name = named.partition(":")
        kind = getattr(import_module(path), name)
        return kind(**small_knobs(kind))
    source, module = WRITTEN, ModuleType("from_outside")
    sys.modules[module.__name__] = module
    exec(source, vars(module))
    return vars(module)[re.findall(r"^class (\w+)\(", source, flags=re.M)[-1]](M=8)


def context_for(method: Method, wire: WireFormat = FLOAT32) -> Context:
    if method.trains_network:
        context = tiny_context(architecture=architecture(method.name) if method.name in NAMES else "conv")
    else:
        context = feature_context()
    return dataclasses.replace(context, clients=len(SIZES[0]), wire=wire)


def tasks_for(method: Method) -> ImageTasks:
    """Two tasks; the second one begins with the last class of the first, and one client has no sample of it."""
    if method.trains_network:
        tasks = image_tasks(np.random.default_rng(0), CLASSES, SIZES)
    else:
        # Not negative, since FedFeCAM takes roots.
        tasks = [[(Z.abs(), y) for Z, y in clients] for clients in feature_tasks(0, CLASSES, SIZES)]
    return [tasks[0], *([(Z, y - 1) for Z, y in clients] for clients in tasks[1:])]


def federation_for(method: Method, wire: WireFormat = FLOAT32, **options: Any) -> Federation:
    """A run before its first task; `options` are those of `federation_of`."""
    return federation_of(method, context_for(method, wire), tasks_for(method), **options)


def same_once_decoded(a: Message, b: Message) -> bool:
    one, other = (decoded(message, torch.float64) for message in (a, b))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
