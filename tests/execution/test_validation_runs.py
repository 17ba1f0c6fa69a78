"""Runs that are tested on validation samples, beside the test set or in its place."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from fcl_bench.data.images.stored import ArrayImages, Images
from fcl_bench.data.sources import digits
from fcl_bench.execution import predicting
from tests.small_runs import interrupted_in, run_in

AFL = ("method=afl", "tasks=3", "clients=3", "beta=0.5")
#: Of what both kinds of evaluation ask: closed form, a trained network, heads on features, task by task.
METHODS = {
    "afl": AFL,
    "fedavg": (*AFL, "method=fedavg", "backbone=tiny", "backbone.width=4", "method.training.rounds=2"),
    "fedprotip": (*AFL, "method=fedprotip", "backbone=tiny", "backbone.width=4", "method.training.rounds=1"),
}
NAMES = ["afl", *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name != "afl")]


def rows(folder, name):
    with (folder / name).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", NAMES)
def test_validation_beside_the_test_set_and_in_its_place_give_the_same_numbers(name, tmp_path):
    """The clients learn the same, and the server is asked about the same samples."""
    typed = (*METHODS[name], "data.validation=0.2", "evaluate_rounds=1")
    beside = run_in(tmp_path, *typed)
    instead = run_in(tmp_path, *typed, "data.test=false")
    held, alone = beside.record["validation"], instead.record["validation"]
    assert (held["replaces_test"], alone["replaces_test"], alone["metrics"]) == (False, True, None)
    assert held["metrics"] == instead.record["metrics"]
    assert held["metrics"] != beside.record["metrics"]
    assert (beside.folder / "validation_matrix.csv").read_text() == (instead.folder / "accuracy_matrix.csv").read_text()
    for column in ("task", "round"):
        assert [row[column] for row in rows(beside.folder, "rounds.csv")] == [
            row[column] for row in rows(instead.folder, "rounds.csv")
        ]
    assert [row["validation"] for row in rows(beside.folder, "rounds.csv")] == [
        row["accuracy"] for row in rows(instead.folder, "rounds.csv")
    ]
    assert [row["validation"] for row in rows(beside.folder, "tasks.csv")] == [
        row["accuracy"] for row in rows(instead.folder, "tasks.csv")
    ]
    assert beside.record["communication"] == instead.record["communication"]


@pytest.mark.slow
def test_no_client_learns_from_validation_samples(tmp_path, monkeypatch):
    """Other validation samples change no bit of the classifier."""
    outcome = run_in(tmp_path / "usual", *AFL, "data.validation=0.2")
    with np.load(outcome.folder / "partition.npz") as partition:
        held = np.concatenate([partition[f"validation_t{t}"] for t in range(3)])
    load = digits.Digits.load

    def changed(source):
        dataset = load(source)
        pixels = dataset.train.inputs.pixels.copy()
        pixels[held] = 255 - pixels[held]
        return replace(dataset, train=replace(dataset.train, inputs=ArrayImages(pixels), fingerprint="changed"))

    monkeypatch.setattr(digits.Digits, "load", changed)
    other = run_in(tmp_path / "changed", *AFL, "data.validation=0.2")
    assert other.record["metrics"] == outcome.record["metrics"]
    assert other.record["validation"]["metrics"] != outcome.record["validation"]["metrics"]
    models = [load_file(one.folder / "model.safetensors") for one in (outcome, other)]
    assert all(np.array_equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.slow
def test_a_resumed_run_has_the_same_validation_numbers(tmp_path, monkeypatch):
    typed = (*METHODS["fedavg"], "data.validation=0.2", "evaluate_rounds=1", "checkpoint_rounds=1")
    whole = run_in(tmp_path / "whole", *typed)
    with interrupted_in(1, monkeypatch):
        run_in(tmp_path / "parts", *typed)
    again = run_in(tmp_path / "parts", *typed)
    assert again.record["validation"] == whole.record["validation"]
    for name in ("rounds.csv", "validation_matrix.csv"):
        assert (again.folder / name).read_text() == (whole.folder / name).read_text()


class Unreadable(Images):
    """Images of a test set that nobody may look at."""

    fingerprint = "spoiled"

    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        raise AssertionError("the test set was read")

    def describe(self, index):
        raise AssertionError("the test set was read")


@pytest.mark.slow_cases("afl")
@pytest.mark.parametrize("name", NAMES)
def test_a_test_set_that_counts_for_nothing_is_never_read(name, tmp_path, monkeypatch):
    typed = (*METHODS[name], "data.validation=0.2", "data.test=false")
    usual = run_in(tmp_path / "usual", *typed)
    load = digits.Digits.load

    def spoiled(source):
        dataset = load(source)
        return replace(dataset, test=replace(dataset.test, inputs=Unreadable(len(dataset.test)), fingerprint="spoiled"))

    monkeypatch.setattr(digits.Digits, "load", spoiled)
    blind = run_in(tmp_path / "blind", *typed)
    assert blind.record["metrics"] == usual.record["metrics"]
    with pytest.raises(AssertionError, match="the test set was read"):  # the trap works
        run_in(tmp_path / "looks", *typed, "data.test=true")


def test_a_saved_model_is_tried_on_the_samples_that_the_run_was_tested_on(tmp_path):
    outcome = run_in(tmp_path, *AFL, "data.validation=0.2", "data.test=false")
    config = {"data": {"_target_": "fcl_bench.data.sources.digits.Digits", "name": "digits"}}
    config["data"] |= {"validation": 0.2, "test": False}
    inputs, labels, tasks, indices = predicting.tested_samples(outcome.folder, outcome.record, config)
    assert len(inputs) == len(labels) == len(tasks) == outcome.record["validation"]["samples"]
    with np.load(outcome.folder / "partition.npz") as partition:
        held = np.concatenate([partition[f"validation_t{t}"] for t in range(3)])
        trained = np.concatenate([partition[f"train_t{t}_c{k}"] for t in range(3) for k in range(3)])
        assert "test_t0" not in partition.files
    np.testing.assert_array_equal(indices, np.sort(held))
    assert not np.isin(indices, trained).any()
