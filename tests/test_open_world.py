"""Data that closed-world streams do not have: whole runs, and what their metrics mean there."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from fcl_bench.execution.run import Outcome
from tests.conftest import write_features
from tests.small_runs import run_in

CLOSED_FORM = {
    "fedran": ("method.M=64", "method.rank=8"),
    "stsa": ("method.M=64",),
    "stsa_e": ("method.M=64", "method.dummy_clients=4"),
    "afl": (),
    "afcl": (),
    "centred_sketch": ("method.M=64", "method.rank=4"),
    "gaussian_sketch": ("method.M=64", "method.rank=4", "method.class_rank=4"),
    "centralised_ridge": ("method.M=64",),
}
closed_forms = pytest.mark.parametrize("method", CLOSED_FORM)


def odd_features(path):
    """Class 9 has one training sample, class 8 no test sample, classes 77 and 78 no training sample."""
    rng = np.random.default_rng(0)
    train = np.array([0] * 40 + [1] * 40 + [8] * 40 + [9])
    test = np.array([0] * 20 + [1] * 20 + [9] * 5 + [77] * 3 + [78])
    centres = 4 * rng.standard_normal((100, 12))

    def around(labels):
        return (centres[labels] + rng.standard_normal((len(labels), 12))).astype(np.float32)

    np.savez(path, x_train=around(train), y_train=train, x_test=around(test), y_test=test)
    return path


def run_odd(tmp_path, method: str, *overrides: str) -> Outcome:
    file = odd_features(tmp_path / "odd.npz")
    return run_in(
        tmp_path / "out",
        "data=features",
        f"data.path={file}",
        f"method={method}",
        *CLOSED_FORM[method],
        "split.shuffle=false",
        "partition.min_size=0",
        "clients=3",
        *overrides,
    )


@pytest.mark.slow_cases("afcl", "centralised_ridge", "centred_sketch", "stsa_e")
@closed_forms
def test_classes_without_tests_single_samples_and_unseen_classes(method, tmp_path):
    """One class a task: the third task has no test sample, the fourth one training sample."""
    outcome = run_odd(tmp_path, method, "tasks=4")
    record = outcome.record
    tasks = pd.read_csv(outcome.folder / "tasks.csv")
    assert tasks.classes.tolist() == [1, 1, 1, 1]
    assert tasks.train_samples.tolist() == [40, 40, 40, 1]
    assert tasks.test_samples.tolist() == [20, 20, 0, 5]
    assert record["unseen_test_samples"] == 4
    matrix = pd.read_csv(outcome.folder / "accuracy_matrix.csv")
    assert matrix.task_2.isna().all()
    assert matrix.notna().sum().tolist() == [4, 3, 0, 1]
    # The pooled accuracy after each task is over the samples of tested classes only.
    right = (matrix.fillna(0).to_numpy() / 100 * [20, 20, 0, 5]).sum(axis=1)
    np.testing.assert_allclose(tasks.accuracy, 100 * right / [20, 40, 40, 45])
    metrics = record["metrics"]
    assert metrics["A_T"] == pytest.approx(tasks.accuracy.iloc[-1])
    assert metrics["A_avg"] == pytest.approx(tasks.accuracy[[0, 1, 3]].mean())
    assert metrics["plasticity"] == pytest.approx(np.mean([matrix.task_0[0], matrix.task_1[1], matrix.task_3[3]]))
    assert metrics["A_T"] > 80
    # The single sample went to one client; the others had nothing to send in that task.
    uploads = pd.read_csv(outcome.folder / "uploads.csv")
    last = uploads[(uploads.task == 3) & (uploads.stage == "statistics")]
    assert sorted(last.up_bytes > 0) == [False, False, True]


def test_a_first_task_without_tests_has_no_accuracy_and_says_so(tmp_path, command):
    """Classes 8 first: null in run.json, empty in the tables, "not defined" on the screen."""
    file = odd_features(tmp_path / "odd.npz")
    with np.load(file) as arrays:
        kept = {name: arrays[name] for name in arrays.files}
    kept["y_train"] = np.where(kept["y_train"] == 8, -1, kept["y_train"]) + 1
    kept["y_test"] = kept["y_test"] + 1
    np.savez(file, **kept)
    code, out, err = command(
        "data=features",
        f"data.path={file}",
        "method=afl",
        "tasks=4",
        "split.shuffle=false",
        "partition.min_size=0",
        f"out={tmp_path / 'out'}",
    )
    assert code == 0
    assert "not defined" in out
    assert "no test sample for 1 class (0); they count in no accuracy" in err
    assert "no training sample for 2 classes (78, 79); their 4 test samples are left out" in err
    [folder] = [file.parent for file in (tmp_path / "out" / "runs").glob("*/run.json")]
    record = json.loads((folder / "run.json").read_text())
    assert record["metrics"]["accuracy"][0] is None
    assert all(value is not None for value in record["metrics"]["accuracy"][1:])
    tasks = pd.read_csv(folder / "tasks.csv")
    assert tasks.accuracy.isna().tolist() == [True, False, False, False]


@pytest.mark.slow
def test_classes_without_tests_leave_the_others_as_they_are(tmp_path):
    """The closed world with some test samples taken away: the matrix of the others does not change."""
    file = write_features(tmp_path / "whole.npz")
    with np.load(file) as arrays:
        kept = {name: arrays[name] for name in arrays.files}
    gone = kept["y_test"] == 7
    less = write_features(tmp_path / "less.npz", x_test=kept["x_test"][~gone], y_test=kept["y_test"][~gone])
    matrices = []
    for path in (file, less):
        choice = ("data=features", f"data.path={path}", "method=stsa", "method.M=64", "tasks=6", "split.shuffle=false")
        matrices.append(pd.read_csv(run_in(tmp_path, *choice).folder / "accuracy_matrix.csv"))
    order = [0, 3, 5, 7, 11, 400]
    missing = f"task_{order.index(7)}"
    assert matrices[1][missing].isna().all()
    pd.testing.assert_frame_equal(matrices[0].drop(columns=missing), matrices[1].drop(columns=missing))
