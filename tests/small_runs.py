"""Whole runs in this process, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from fcl_bench.config import Settings, config_dir, load_settings
from fcl_bench.engine import federation as engine
from fcl_bench.protocol.task import Task
from fcl_bench.runs.run import Outcome, run


def settings_for(out: Path, *overrides: str) -> Settings:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return load_settings(compose("config", overrides=[f"out={out}", *overrides]))


def run_in(out: Path, *overrides: str) -> Outcome:
    return run(settings_for(out, *overrides))


@contextmanager
def interrupted_in(task_index: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run in this block is interrupted when it comes to this task; the block must contain nothing else."""
    learn = engine.Federation._learn

    def interrupted(self: engine.Federation, task: Task) -> None:
        if task.index == task_index:
            raise KeyboardInterrupt
        learn(self, task)

    with monkeypatch.context() as patch:
        patch.setattr(engine.Federation, "_learn", interrupted)
        try:
            yield
        except KeyboardInterrupt:
            return
    pytest.fail(f"the run never came to task {task_index}")
