"""Whole runs in this process, for tests."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from omegaconf import DictConfig

from fcl_bench.composition import composed
from fcl_bench.config import Settings, load_settings
from fcl_bench.engine import loop as engine
from fcl_bench.execution.run import Outcome, run
from fcl_bench.protocol.context import Task


def settings_for(out: Path, *overrides: str) -> Settings:
    config = copy.deepcopy(_composed_once(overrides))
    config.out = str(out)
    return load_settings(config)


@functools.cache
def _composed_once(overrides: tuple[str, ...]) -> DictConfig:
    """Hydra takes a tenth of a second, and many tests run the same with another folder."""
    return composed(overrides)


def run_in(out: Path, *overrides: str) -> Outcome:
    return run(settings_for(out, *overrides))


@contextmanager
def interrupt_at(task_index: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this block Ctrl-C comes to whoever runs, each time that a run comes to this task."""
    learn = engine.Federation._learn

    def interrupted(self: engine.Federation, task: Task) -> None:
        if task.index == task_index:
            raise KeyboardInterrupt
        return learn(self, task)

    with monkeypatch.context() as patch:
        patch.setattr(engine.Federation, "_learn", interrupted)
        yield


@contextmanager
def interrupted_in(task_index: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run in this block is interrupted when it comes to this task; the block must contain nothing else."""
    with interrupt_at(task_index, monkeypatch):
        try:
            yield
        except KeyboardInterrupt:
            return
    pytest.fail(f"the run never came to task {task_index}")
