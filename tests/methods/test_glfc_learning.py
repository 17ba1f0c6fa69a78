"""GLFC forgets less than finetuning, on the digits with three seeds; minutes of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.small_runs import run_in

pytestmark = pytest.mark.slow

#: As docs/methods/glfc.md reports it: 5 tasks of 2 classes, 5 clients.
SCALE = (
    *("data=digits", "profile=quick", "backbone.width=8", "beta=0.5"),
    *("method.training.rounds=12", "method.training.epochs=2", "method.training.lr=0.5"),
)


def accuracies(out: Path, *overrides: str) -> np.ndarray:
    """(3, 2) A_T, and A_T with the task given, of seeds 0 to 2."""
    records = [run_in(out, *SCALE, f"seed={seed}", *overrides).record for seed in range(3)]
    return np.array([[record["metrics"]["A_T"], record["task_aware"]["A_T"]] for record in records])


@pytest.mark.parametrize("proxy", ["none", "reconstruct"])
def test_it_ends_above_finetuning_with_and_without_the_task_given(proxy, tmp_path):
    """With the same step size: A_T with every seed, and with the task given on average, since 100 is not far."""
    gains = accuracies(tmp_path, "method=glfc", f"method.proxy={proxy}") - accuracies(tmp_path, "method=fedavg")
    assert (gains[:, 0] > 30).all()
    assert gains[:, 1].mean() > 15
