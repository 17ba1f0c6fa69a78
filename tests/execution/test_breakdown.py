"""The files of what was answered class by class, client by client and sample by sample."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fcl_bench.execution.plan import make_plan
from tests.small_runs import interrupted_in, run_in, settings_for

SMALL = ("method=stsa", "method.M=64", "tasks=3", "clients=3")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return run_in(tmp_path_factory.mktemp("kept"), *SMALL, "predictions=true")


def test_the_files_agree_with_the_samples(kept):
    """Each from predictions.parquet and partition.npz alone."""
    rows, folder = pd.read_parquet(kept.folder / "predictions.parquet"), kept.folder
    rows["right"] = rows["label"] == rows["prediction"]
    accuracy = 100 * rows.groupby("after")["right"].mean()
    np.testing.assert_allclose(accuracy, kept.record["metrics"]["accuracy"])
    by_class = pd.read_csv(folder / "class_accuracy.csv")
    by_class.columns = [int(name.removeprefix("class_")) for name in by_class]
    expected = 100 * rows.pivot_table("right", "after", "label")[by_class.columns]
    np.testing.assert_allclose(by_class, expected)
    clients = pd.read_csv(folder / "client_accuracy.csv", index_col="client")
    labels = settings_for(folder, *SMALL).data.load().train.labels
    with np.load(folder / "partition.npz") as partition:
        for client in range(3):
            had = []
            for task in range(3):
                had += labels[partition[f"train_t{task}_c{client}"]].tolist()
                mix = by_class.loc[task, had].mean() if had else np.nan
                np.testing.assert_allclose(clients.loc[client, f"task_{task}"], mix)
    last = clients["task_2"].dropna()
    said = kept.record["client_accuracy"]
    assert said["clients"] == len(last)
    np.testing.assert_allclose(
        [said[name] for name in ("mean", "std", "least", "most")],
        [last.mean(), last.std(ddof=0), last.min(), last.max()],
    )


def test_only_runs_that_keep_samples_have_another_id(kept, tmp_path):
    plain = make_plan(settings_for(tmp_path, *SMALL))
    assert plain.id != kept.record["run_id"]
    assert plain.id == make_plan(settings_for(tmp_path, *SMALL, "predictions=false")).id
    assert settings_for(tmp_path, *SMALL).identity()["predictions"] is False


def test_a_resumed_run_has_the_same_bits(kept, tmp_path, monkeypatch):
    with interrupted_in(2, monkeypatch):
        run_in(tmp_path, *SMALL, "predictions=true")
    resumed = run_in(tmp_path, *SMALL, "predictions=true")
    names = ("confusion.npz", "predictions.parquet", "class_accuracy.csv", "client_accuracy.csv", "model.safetensors")
    for name in names:
        assert (resumed.folder / name).read_bytes() == (kept.folder / name).read_bytes(), name
    assert {*names} <= resumed.record["files"].keys()


@pytest.mark.slow
def test_samples_whose_label_nobody_knows_count_in_the_clients_mix(tmp_path):
    """As in the formula: what the client holds, labelled or not."""
    whole, few = (run_in(tmp_path, *SMALL, *more) for more in ((), ("label_rate=0.3",)))
    for outcome in (whole, few):
        by_class = pd.read_csv(outcome.folder / "class_accuracy.csv").iloc[-1]
        labels = settings_for(tmp_path, *SMALL).data.load().train.labels
        with np.load(outcome.folder / "partition.npz") as partition:
            had = np.concatenate([labels[partition[f"train_t{task}_c0"]] for task in range(3)])
        clients = pd.read_csv(outcome.folder / "client_accuracy.csv", index_col="client")
        np.testing.assert_allclose(clients.loc[0, "task_2"], by_class[[f"class_{label}" for label in had]].mean())
