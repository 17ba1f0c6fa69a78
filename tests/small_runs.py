"""Whole runs in this process, for tests."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fcl_bench.composition import composed
from fcl_bench.config import Settings, load_settings
from fcl_bench.engine import loop as engine
from fcl_bench.execution.run import Outcome, run
from fcl_bench.protocol.context import Task

#: Stands for the folder of a run in settings that are made once.
_OUT = "THE-FOLDER-OF-THIS-RUN"


def settings_for(out: Path, *overrides: str) -> Settings:
    return _moved(_settings_once(overrides), str(out))


@functools.cache
def _settings_once(overrides: tuple[str, ...]) -> Settings:
    """Composing and checking takes a third of a short run's time, and many tests run the same in another folder."""
    config = composed(overrides)
    config.out = _OUT
    return load_settings(config)


def _moved(value: Any, out: str) -> Any:
    """A copy with `out` for the folder."""
    if isinstance(value, str):
        return value.replace(_OUT, out)
    if isinstance(value, dict):
        return {key: _moved(own, out) for key, own in value.items()}
    if isinstance(value, list):
        return [_moved(own, out) for own in value]
    if not dataclasses.is_dataclass(value):
        return value
    made = copy.copy(value)
    vars(made).update(_moved(vars(value), out))
    return made


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
