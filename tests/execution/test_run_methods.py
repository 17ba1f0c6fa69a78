"""Whole runs: with every way to send, with scarce labels, with bounds."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fcl_bench.execution.run import Outcome
from tests.conftest import shared, write_features
from tests.small_methods import NAMES, short_run, trains_by_gradient
from tests.small_runs import interrupted_in, run_in, settings_for

CLOSED_FORM = [name for name in NAMES if not trains_by_gradient(name)]


def csv_of(outcome: Outcome, name: str) -> pd.DataFrame:
    return pd.read_csv(outcome.folder / name)


@pytest.mark.slow_cases(
    "afcl",
    "centralised_ridge",
    "centralised_softmax",
    "centred_sketch",
    "ds_al",
    "fedcbc",
    "fedfecam",
    "fedklda",
    "fedncm",
    "fedran",
    "stsa",
    "stsa_e",
)
@pytest.mark.parametrize("method", CLOSED_FORM)
def test_the_free_wire_options_change_bytes_and_nothing_else(method, tmp_path):
    choice = (*short_run(method), "tasks=2", "clients=3")
    full = run_in(tmp_path, *choice)
    free = run_in(tmp_path, *choice, "wire.gram=packed", "wire.columns=held", "wire.projection=matrix")
    assert free.record["metrics"] == full.record["metrics"]
    up = [outcome.record["communication"]["up_max_bytes"] for outcome in (full, free)]
    if method in ("stsa", "afl", "afcl"):
        assert up[1] < 0.7 * up[0]
    elif method == "stsa_e":
        assert up[1] < up[0]
    down = [outcome.record["communication"]["down_max_bytes"] for outcome in (full, free)]
    if hasattr(made := settings_for(tmp_path, *choice).method, "M"):
        assert (down[1] > 64 * 96 * 8) == (made.M is not None)
    assert free.record["communication"]["wire"]["gram"] == "packed"


@pytest.mark.slow
def test_scarce_labels_are_drawn_once_for_every_method_and_counted(tmp_path):
    choice = ("method.M=96", "method.rank=40", "tasks=2", "clients=3", "label_rate=0.2")
    plain = run_in(tmp_path, *choice)
    ssl = run_in(tmp_path, *choice, "method.ssl=true", "method.tau=0.8")
    sketch = run_in(tmp_path, "method=centred_sketch", *choice[0:1], *choice[2:])
    unlabelled = [np.load(outcome.folder / "partition.npz")["unlabelled"] for outcome in (plain, ssl, sketch)]
    assert all(np.array_equal(unlabelled[0], other) for other in unlabelled[1:])
    for outcome in (plain, ssl, sketch):
        labels, uploads = outcome.record["labels"], csv_of(outcome, "uploads.csv")
        assert labels["rate"] == 0.2
        assert labels["samples"] - labels["labelled"] == len(unlabelled[0])
        assert abs(labels["labelled"] - 0.2 * labels["samples"]) <= 0.5 * 6
        for name in ("samples", "labelled", "accepted", "right"):
            assert (
                uploads[name].sum()
                == labels[name]
                == (csv_of(outcome, "tasks.csv")[{"samples": "train_samples"}.get(name, name)].sum())
            )
    assert plain.record["labels"]["accepted"] == sketch.record["labels"]["accepted"] == 0
    counts = ssl.record["labels"]
    assert 0 < counts["right"] <= counts["accepted"] <= len(unlabelled[0])
    assert counts["right"] > 0.6 * counts["accepted"]


def test_classes_without_a_label_are_told(tmp_path, caplog):
    path = write_features(tmp_path / "f.npz", y_train=np.array([3] + [7] * 120 + [11] * 119))
    labels = np.array([3, 7, 11] * 20)
    write_features(tmp_path / "f.npz", y_train=np.array([3] + [7] * 120 + [11] * 119), y_test=labels)
    common = ("data=features", f"data.path={path}", "method.M=32", "method.rank=8", "clients=1", "tasks=1")
    run_in(tmp_path, *common, "label_rate=0.3")
    assert "label_rate=0.3 leaves 1 of 3 classes without a label" in caplog.text


def test_a_client_without_a_label_takes_no_part(tmp_path):
    scarce = ("label_rate=0.02", "method.ssl=true", "clients=20", "partition.min_size=0")
    outcome = run_in(tmp_path, "method.M=32", "method.rank=8", *scarce)
    uploads = csv_of(outcome, "uploads.csv")
    silent = uploads[uploads.labelled == 0]
    assert len(silent) > 0
    assert (silent.samples > 0).any()
    assert (silent[["accepted", "right", "up_bytes", "down_bytes", "client_seconds"]] == 0).all(axis=None)


@pytest.mark.slow_cases("centred_sketch")
@pytest.mark.parametrize("method", ["fedran", "centred_sketch"])
def test_bounds_have_their_file_and_survive_a_resume(method, tmp_path, monkeypatch):
    choice = (f"method={method}", "method.M=40", "method.rank=10", "method.bounds=true", "tasks=3", "clients=2")
    whole = run_in(tmp_path / "whole", *choice)
    with interrupted_in(2, monkeypatch):
        run_in(tmp_path / "parts", *choice)
    parts = run_in(tmp_path / "parts", *choice)
    assert parts.record["bounds"] == whole.record["bounds"]
    rows = csv_of(whole, "bounds.csv")
    assert len(rows) == 3
    assert (rows.gram_error <= rows.gram_bound).all()
    assert (rows.certified <= rows.agree).all()


@pytest.mark.slow
def test_afl_ends_at_the_centralised_least_squares(tmp_path):
    """59.93 % on the shared CIFAR-100 features, for any beta, number of clients and order."""
    features = shared("data/cifar100-mobilenetv2.npz")
    common = ("data=features", f"data.path={features}", "method=afl", "wire.dtype=float64")
    runs = [
        run_in(tmp_path, *common, "tasks=10"),
        run_in(tmp_path, *common, "tasks=10", "beta=5", "clients=50", "partition.min_size=0"),
        run_in(tmp_path, *common, "tasks=2", "partition=shards", "seed=3"),
    ]
    assert [f"{outcome.record['metrics']['A_T']:.2f}" for outcome in runs] == ["59.93"] * 3
