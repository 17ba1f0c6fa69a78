"""Experiment trackers that a run can report to: off by default, and never part of its result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fcl_bench.config import target_class
from fcl_bench.errors import UserError, installing
from fcl_bench.typed import typed_instance


@dataclass(frozen=True)
class TrackedRun:
    """A run that starts or continues.

    Attributes:
        id: the run's id, the same when the run continues after an interruption.
        label: the name of the run's folder.
        config: everything that determines the result: flat names (`method.rank`) -> plain values.
        out: the root folder of everything that is written.
        tasks_done: the number of complete tasks, if the run continues.
        fresh: whether earlier tracking of this run does not count any more (force=true).
    """

    id: str
    label: str
    config: dict[str, Any]
    out: Path
    tasks_done: int
    fresh: bool


class Tracker:
    """A choice of the group `logger`: it is told of one run after the other. This one does nothing."""

    def start(self, run: TrackedRun) -> Tracker:
        """Open the tracker. Raises a `UserError` if its packages are not installed (see `require_packages`)."""
        return self

    def task(self, metrics: dict[str, float], step: int) -> None:
        """A task is complete. This comes before the checkpoint is saved, so a run killed in between repeats the call.

        Args:
            metrics: finite numbers by name.
            step: number of the task, from 0.
        """

    def finish(self, metrics: dict[str, float]) -> None:
        """The run is complete: the numbers of its record, by name."""

    def close(self) -> None:
        """The process leaves the run, complete or not; called once, after everything else."""


@dataclass
class NoTracking(Tracker):
    """`logger=none`: no tracking."""


def load_tracking(config: Any) -> Tracker:
    """The choice of the group `logger` in what Hydra composed; no tracking if there is none.

    Raises:
        UserError: a wrong key or value.
    """
    from omegaconf import OmegaConf

    node = OmegaConf.select(config, "logger")
    if node is None:
        return NoTracking()
    if not OmegaConf.is_dict(node):
        raise UserError(f"logger={node} is not a configuration", "logger=none, tensorboard, mlflow or wandb")
    knobs: Any = OmegaConf.to_container(node, resolve=True)
    choice: Tracker = typed_instance(target_class("logger", knobs.pop("_target_", None)), knobs, "logger")
    return choice


def require_packages(tracking: Any) -> None:
    """Raise a `UserError` unless the `packages` of a logger are installed; it says how to. None is imported."""
    for package in getattr(tracking, "packages", ()):
        try:
            found = find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise UserError(
                f"logger={tracking.name}: {package} is not installed", f"logger=none, or {installing('logger')}"
            )


def flat(node: Any, prefix: str = "", separator: str = "/") -> dict[str, Any]:
    """Nested mappings and lists as one level: `{"a": {"b": [1, 2]}}` as `a/b/0` and `a/b/1`."""
    if not isinstance(node, dict | list | tuple):
        return {prefix: node}
    leaves: dict[str, Any] = {}
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        leaves |= flat(value, f"{prefix}{separator}{key}" if prefix else str(key), separator)
    return leaves


def numbers(node: Any, prefix: str = "") -> dict[str, float]:
    """The finite numbers in `node`, flat; texts, truth values and nulls are left out."""
    return {
        name: float(value)
        for name, value in flat(node, prefix).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
