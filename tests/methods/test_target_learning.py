"""TARGET forgets less than finetuning, on the digits with three seeds; minutes of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.small_runs import run_in

pytestmark = pytest.mark.slow

#: As docs/methods/target.md reports it.
SCALE = (
    *("data=digits", "profile=quick", "backbone.width=8", "beta=1"),
    *("method.training.rounds=12", "method.training.epochs=2", "method.training.augment=none"),
    "method.training.momentum=0",
)
SYNTHESIS = ("images=320", "batch=64", "warmup=2", "kd_steps=20", "lr_student=0.02")


def measured(out: Path, *overrides: str) -> np.ndarray:
    """A_T, A_T with the task given, and forgetting, of seeds 0 to 2: (3, 3)."""
    runs = [run_in(out, *SCALE, f"seed={seed}", *overrides) for seed in range(3)]
    measures = [(run.record["metrics"], run.record["task_aware"]) for run in runs]
    return np.array([[whole["A_T"], given["A_T"], whole["forgetting"]] for whole, given in measures])


def test_old_tasks_are_forgotten_less_than_after_finetuning(tmp_path):
    """By more than 40 points where all scores compete in fedavg's loss, on average also where the task's alone do.

    With the task given it is as right as fedavg, to three points: more than seeds and rounding leave certain.
    """
    ours = measured(tmp_path, "method=target", *(f"method.synthesis.{knob}" for knob in SYNTHESIS))
    plain = measured(tmp_path, "method=fedavg", "method.loss_classes=seen")
    alike = measured(tmp_path, "method=fedavg", "method.loss_classes=task")
    assert (ours[:, 2] < plain[:, 2] - 40).all()
    assert ours[:, 2].mean() < alike[:, 2].mean()
    assert (ours[:, 0] > plain[:, 0] + 10).all()
    assert ours[:, 1].mean() > max(plain[:, 1].mean(), alike[:, 1].mean()) - 3
