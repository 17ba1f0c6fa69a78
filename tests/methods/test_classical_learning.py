"""FedEWC and FedLwF forget less than finetuning, on the digits with three seeds; minutes of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.small_runs import run_in

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_pictures")]

#: As docs/fedewc.md and docs/fedlwf.md report it.
SCALE = (
    *("data=digits", "profile=quick", "backbone.width=8", "beta=1"),
    *("method.training.rounds=10", "method.training.epochs=2"),
)


def task_given(out: Path, *overrides: str) -> np.ndarray:
    """A_T with the task given, of seeds 0 to 2."""
    runs = [run_in(out, *SCALE, f"seed={seed}", *overrides) for seed in range(3)]
    return np.array([run.record["task_aware"]["A_T"] for run in runs])


@pytest.mark.parametrize("method", ["fedewc", "fedlwf"])
def test_more_of_the_earlier_tasks_is_left_than_after_finetuning(method, tmp_path):
    """By more than one standard deviation of the differences by seed, each with its default scores in the loss."""
    over = {"fedewc": "seen", "fedlwf": "task"}[method]
    plain = task_given(tmp_path, "method=finetune", f"method.loss_over={over}")
    gains = task_given(tmp_path, f"method={method}") - plain
    assert gains.mean() > gains.std(ddof=1)
