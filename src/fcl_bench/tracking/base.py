"""What a run tells a tracker, and what a tracker has to do with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from fcl_bench.config import target_class
from fcl_bench.errors import UserError, installing
from fcl_bench.typed import typed_instance


@dataclass(frozen=True)
class TrackedRun:
    """A run that starts, or goes on.

    Attributes:
        id: the run's; the same again when it goes on after an interruption.
        label: the name of its folder.
        config: everything that determines the result; flat names (`method.rank`) to plain values.
        out: root of everything that is written.
        tasks_done: complete tasks, when it goes on.
        fresh: whether what was tracked of this run before does not count any more (force=true).
    """

    id: str
    label: str
    config: dict[str, Any]
    out: Path
    tasks_done: int
    fresh: bool


class Tracker:
    """A tracker's side of one run; this one does nothing."""

    def task(self, metrics: dict[str, float], step: int) -> None:
        """A task is complete. Told before the checkpoint is kept, so a run that is killed in between tells it again.

        Args:
            metrics: finite numbers by name.
            step: number of the task, from 0.
        """

    def finish(self, metrics: dict[str, float]) -> None:
        """The run is complete: the numbers of its record, by name."""

    def close(self) -> None:
        """The process leaves the run, complete or not; called once, after everything else."""


class Tracking(Protocol):
    """A choice of the group `track`."""

    def start(self, run: TrackedRun) -> Tracker:
        """Open the tracker. Raises a `UserError` if its package is not installed."""


@dataclass
class NoTracking:
    """`track=none`: a run tells nobody."""

    def start(self, run: TrackedRun) -> Tracker:
        """See `Tracking`."""
        return Tracker()


def load_tracking(config: Any) -> Tracking:
    """The choice of the group `track` in what Hydra composed; no tracking where there is none.

    Raises:
        UserError: a wrong key or value.
    """
    from omegaconf import OmegaConf

    node = OmegaConf.select(config, "track")
    if node is None:
        return NoTracking()
    if not OmegaConf.is_dict(node):
        raise UserError(f"track={node} is not a configuration", "track=none, tensorboard, mlflow or wandb")
    knobs: Any = OmegaConf.to_container(node, resolve=True)
    choice: Tracking = typed_instance(target_class("track", knobs.pop("_target_", None)), knobs, "track")
    return choice


def require_package(track: str, module: str) -> ModuleType:
    """A tracker's package. Raises a `UserError` that says how to install it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"track={track}: {error.name} is not installed", f"track=none, or {installing('track')}"
        ) from error


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
