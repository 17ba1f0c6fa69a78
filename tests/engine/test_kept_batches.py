"""Which test batches are kept, and that keeping them changes nothing."""

from __future__ import annotations

import pytest
import torch

from fcl_bench.engine import federation as engine
from fcl_bench.engine import kept_batches
from fcl_bench.engine.kept_batches import KeptBatches


def batch(rows: int) -> torch.Tensor:
    return torch.zeros(rows, 2, dtype=torch.float64)


def test_a_full_batch_is_kept_and_a_partial_one_is_not():
    kept, full = KeptBatches(size=3), batch(3)
    assert kept.get(0) is None
    kept.offer(0, full)
    kept.offer(1, batch(1))
    assert kept.get(0) is full
    assert kept.get(1) is None


def test_what_does_not_fit_is_not_kept(monkeypatch):
    monkeypatch.setattr(kept_batches, "BUDGET", batch(3).nbytes)
    kept = KeptBatches(size=3)
    for number in range(2):
        kept.offer(number, batch(3))
    assert [kept.get(number) is not None for number in range(2)] == [True, False]


@pytest.mark.parametrize("budget", [0, 2**28])
def test_a_run_does_not_depend_on_what_was_kept(budget, monkeypatch, tmp_path, feature_file, command):
    """The smallest batches, so that nearly all samples are kept, or none; the models and answers are the same."""
    import numpy as np

    def matrix(name: str) -> np.ndarray:
        arguments = ("data=features", f"data.path={feature_file}", "method=stsa", "method.M=50", "tasks=3")
        assert command(f"out={tmp_path / name}", *arguments)[0] == 0
        [folder] = (tmp_path / name / "runs").glob("stsa*")
        return np.loadtxt(folder / "accuracy_matrix.csv", delimiter=",", dtype=str)

    usual = matrix("usual")
    monkeypatch.setattr(kept_batches, "BUDGET", budget)
    monkeypatch.setattr(engine, "EVALUATION_BATCH", 4)
    assert (matrix("small") == usual).all()
