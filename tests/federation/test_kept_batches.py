"""Which test batches are kept, and that keeping them changes nothing."""

from __future__ import annotations

import pytest
import torch

from fcl_bench.federation import engine, kept_batches
from fcl_bench.federation.kept_batches import KeptBatches


def test_a_full_batch_is_made_once_and_a_partial_one_every_time():
    kept, made = KeptBatches(size=3), []

    def make(number: int, rows: int):
        def once() -> torch.Tensor:
            made.append(number)
            return torch.full((rows, 2), float(number))

        return once

    for _ in range(3):
        for number, rows in ((0, 3), (1, 3), (2, 1)):
            batch = kept.get(number, make(number, rows))
            assert batch is not None
            assert batch.tolist() == [[number, number]] * rows
    assert made == [0, 1, 2, 2, 2]


def test_what_does_not_fit_is_not_kept(monkeypatch):
    monkeypatch.setattr(kept_batches, "BUDGET", 2 * 3 * 8)
    kept, made = KeptBatches(size=3), []
    for _ in range(2):
        for number in range(2):
            kept.get(number, lambda number=number: made.append(number) or torch.zeros(3, 2, dtype=torch.float64))
    assert made == [0, 1, 1]


def test_a_server_that_prepares_nothing_is_asked_again():
    kept, asked = KeptBatches(size=3), []
    assert [kept.get(0, lambda: asked.append(0)) for _ in range(2)] == [None, None]
    assert len(asked) == 2


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
