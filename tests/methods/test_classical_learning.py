"""What FedEWC and FedLwF keep beside finetuning, on the digits with three seeds; minutes of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.small_runs import run_in

pytestmark = pytest.mark.slow

#: As docs/methods/fedewc.md and docs/methods/fedlwf.md report it.
SCALE = (
    *("data=digits", "profile=quick", "backbone.width=8", "beta=1"),
    *("method.training.rounds=10", "method.training.epochs=2"),
)


def task_given(out: Path, *overrides: str) -> np.ndarray:
    """A_T with the task given, of seeds 0 to 2."""
    runs = [run_in(out, *SCALE, f"seed={seed}", *overrides) for seed in range(3)]
    return np.array([run.record["task_aware"]["A_T"] for run in runs])


def test_fedlwf_leaves_more_of_the_earlier_tasks_than_finetuning(tmp_path):
    """By more than one standard deviation of the differences by seed."""
    gains = task_given(tmp_path, "method=fedlwf") - task_given(tmp_path, "method=fedavg", "method.loss_classes=task")
    assert gains.mean() > gains.std(ddof=1)


def test_fedewc_leaves_as_much_of_them_as_finetuning(tmp_path):
    """The default penalty acts, but is weak: means differ by less than the seeds do (docs/methods/fedewc.md)."""
    plain = task_given(tmp_path, "method=fedavg", "method.loss_classes=seen")
    gains = task_given(tmp_path, "method=fedewc") - plain
    assert gains.any()
    assert abs(gains.mean()) < plain.std(ddof=1)
