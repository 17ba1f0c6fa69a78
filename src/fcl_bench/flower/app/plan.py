"""What both ends of a Flower app derive from its settings: the method, and what its halves know."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from fcl_bench import environment
from fcl_bench.backbones.backbone import Trainable
from fcl_bench.cli.overrides import composed_as_typed, ordered
from fcl_bench.config import Settings, load_settings, target_class
from fcl_bench.data.splits.base import Stream, columns_of
from fcl_bench.errors import UserError
from fcl_bench.protocol.context import WIRE_DTYPES, Context, Task, WireFormat
from fcl_bench.protocol.method import Method
from fcl_bench.typed import typed_instance

#: The labels of each task's classes, or T.
Tasks: TypeAlias = "int | Sequence[Sequence[int]]"
#: The key of a project's run configuration that has keys of fcl-bench, as typed after `fcl-bench`.
RUN_CONFIG = "fcl-bench"
#: The top-level keys that both ends need, beside the method's.
_SHARED = ("seed", "dtype", "threads", "cudnn", "device", "wire")
#: The keys that an app reads; its own code is in the place of all others.
_READ = r"\+?(method|seed|dtype|threads|cudnn|device|wire|on_bad_upload|transport\.(minimum|deadline))(\..+)?"


def settings_of(typed: Iterable[str], run_config: Mapping[str, Any]) -> Settings:
    """The settings of a run.

    Args:
        typed: keys and values, as after `fcl-bench`.
        run_config: of the project; what its key `fcl-bench` says comes last, so it wins.

    Raises:
        UserError: a key or a value that is not known, or that no app reads.
    """
    texts = [*typed, *shlex.split(str(run_config.get(RUN_CONFIG, "")))]
    for text in texts:
        key, _, value = text.partition("=")
        if not re.fullmatch(_READ, key):
            raise UserError(
                f"{text}: a Flower app does not read {key}",
                "method, method.*, seed, dtype, wire.*, threads, cudnn, device, on_bad_upload,"
                " transport.minimum, transport.deadline; transport=flower for noise, secure and the like",
            )
        if (key, value) == ("wire.dtype", "bfloat16"):
            raise UserError(f"{text}: Flower's arrays are NumPy's, which has no bfloat16", "wire.dtype=float16")
    settings = load_settings(composed_as_typed(ordered(["transport=flower", *texts])))
    if settings.transport.minimum == 0:
        raise UserError("transport.minimum=0 would go on without any client", "a share above 0")
    return settings


def shared(settings: Settings) -> dict[str, Any]:
    """What the clients need of the settings, as JSON."""
    return {name: settings.resolved[name] for name in ("method", *_SHARED)}


def halves(run: Mapping[str, Any], body: Trainable | None) -> tuple[Method, Context]:
    """The method, and what both of its halves know.

    Args:
        run: what `shared` returns, and `inputs`, `clients` and `recurring` of a `Context`, and `order`,
            the label of each column.
        body: the network of the app.
    """
    knobs = {key: value for key, value in run["method"].items() if key != "_target_"}
    method: Method = typed_instance(target_class("method", run["method"]["_target_"]), knobs, "method")
    wire = WireFormat(**{**run["wire"], "dtype": WIRE_DTYPES[run["wire"]["dtype"]]})
    context = Context(
        inputs=run["inputs"],
        seed=run["seed"],
        dtype=getattr(torch, run["dtype"]),
        device=environment.choose_device(run["device"]),
        wire=wire,
        network=body if method.trains_network else None,
        clients=run["clients"],
        recurring=run["recurring"],
        threads=None if run["threads"] == "auto" else int(run["threads"]),
        cudnn=run["cudnn"],
        classes=len(run["order"]),
    )
    return method, context


def stream_of(tasks: Tasks, classes: int | None, test_labels: np.ndarray) -> Stream:
    """The stream of an app, whose training samples are where the clients are.

    Args:
        tasks: the labels of each task's classes; or T, over which the labels 0 to `classes` - 1 are spread in order.
        test_labels: (n,) of the test samples, each of which is tested with the first task that has its class.

    Raises:
        UserError: a task without a class, or a class twice in a task.
    """
    if isinstance(tasks, int):
        if classes is None or not 1 <= tasks <= classes:
            raise UserError(f"tasks={tasks} and classes={classes}", "at least one class for each task")
        tasks = [part.tolist() for part in np.array_split(np.arange(classes), tasks)]
    made: list[Task] = []
    order: list[int] = []
    for index, labels in enumerate(tasks):
        if not labels or len(set(labels)) < len(labels):
            raise UserError(f"task {index} has the classes {list(labels)}", "one class or more, each once")
        before = len(order)
        order += [label for label in labels if label not in order]
        columns = tuple(sorted(order.index(label) for label in labels))
        made.append(Task(index, range(before, len(order)), len(order), columns, tuple(order[before:])))
    found = columns_of(test_labels, np.array(order))
    tests = tuple(np.flatnonzero(np.isin(found, task.new_columns)) for task in made)
    nothing = np.zeros(0, dtype=np.int64)
    return Stream(tuple(made), np.array(order), nothing, found, (nothing,) * len(made), tests)
