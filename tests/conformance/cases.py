"""Every method of conf/method and one from outside of the repository, small, in runs of small clients."""

from __future__ import annotations

import dataclasses
import re
import sys
from types import ModuleType
from typing import Any

import numpy as np

from fcl_bench.engine.loop import Federation
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.method import Method
from tests.engine.hostile_cases import small
from tests.methods.training_harness import ImageTasks, feature_tasks, federation_of, image_tasks, tiny_context
from tests.methods.whole_runs import feature_context
from tests.small_methods import NAMES, architecture
from tests.test_adding import block_with

OUTSIDE = "from outside"
EVERY = [*NAMES, OUTSIDE]
CLASSES = [3, 3]
SIZES = [[9, 7, 8], [8, 0, 9]]


def method_of(name: str, **knobs: Any) -> Method:
    """The method with these knobs, or else with few features, rounds and samples."""
    return small(name, **knobs) if name in NAMES else from_outside()


def from_outside() -> Method:
    """The page's own method, as an author would write it."""
    source, module = block_with("class MyClient("), ModuleType("from_outside")
    sys.modules[module.__name__] = module
    exec(source, vars(module))
    return vars(module)[re.findall(r"^class (\w+)\(", source, flags=re.M)[-1]](M=8)


def context_for(method: Method) -> Context:
    if method.trains_network:
        context = tiny_context(architecture=architecture(method.name) if method.name in NAMES else "conv")
    else:
        context = feature_context()
    return dataclasses.replace(context, clients=len(SIZES[0]))


def tasks_for(method: Method) -> ImageTasks:
    """Two tasks; the second one begins with the last class of the first, and one client has no sample of it."""
    if method.trains_network:
        tasks = image_tasks(np.random.default_rng(0), CLASSES, SIZES)
    else:
        # Not negative, since FedFeCAM takes roots.
        tasks = [[(Z.abs(), y) for Z, y in clients] for clients in feature_tasks(0, CLASSES, SIZES)]
    return [tasks[0], *([(Z, y - 1) for Z, y in clients] for clients in tasks[1:])]


def federation_for(method: Method, **options: Any) -> Federation:
    """A run before its first task; `options` are those of `federation_of`."""
    return federation_of(method, context_for(method), tasks_for(method), **options)
