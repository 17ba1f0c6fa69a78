"""Whole runs of methods that train: resumed at any point, diverged, beside other users of torch's generator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fcl_bench.engine import loop as engine
from fcl_bench.execution.run import Outcome
from tests.conftest import write_features
from tests.execution.training_runs import TINY
from tests.small_runs import run_in

#: With everything on that a checkpoint has to keep.
METHODS = {
    "fedavg": (
        "method.training.fraction=0.7",
        "method.frozen_stages=1",
        "method.frozen_heads=true",
        "drift=4",
        "evaluate_rounds=1",
    ),
    "fedprotip": ("method.training.momentum=0.9", "method.columns=40", "method.theory=3", "drift=4"),
    "fedprotip, updated": ("method.columns=8", "method.tip.references=updated", "method.tip.route=batch"),
    "fot": ("method.columns=40", "method.theory=3", "method.training.augment=none", "evaluate_rounds=2"),
    "centralised": ("method.training.momentum=0.9", "drift=4"),
    "centralised, no restart": ("method.restart=false", "method.training.augment=none"),
}
#: Rounds of a task, with those after the model's.
ROUNDS = {
    "fedavg": 3,
    "fedprotip": 5,
    "fedprotip, updated": 5,
    "fot": 4,
    "centralised": 1,
    "centralised, no restart": 1,
}
#: What a run leaves that has no seconds in it.
EXACT = ("model.safetensors", "accuracy_matrix.csv", "task_aware_matrix.csv", "partition.npz")


@pytest.fixture(scope="module")
def whole(images, tmp_path_factory):
    """method -> its uninterrupted run, done when it is first asked for."""
    done: dict[str, Outcome] = {}

    def of(method: str) -> Outcome:
        if method not in done:
            done[method] = run_in(tmp_path_factory.mktemp("whole"), *choice(method, images))
        return done[method]

    return of


def choice(method: str, images: tuple[str, ...]) -> tuple[str, ...]:
    return (f"method={method.partition(',')[0]}", *images, *TINY, *METHODS[method])


@contextmanager
def interrupted(task: int, round_: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run in this block is interrupted in the middle of this round; the block must contain nothing else."""
    whole = engine.Federation._round

    def until(self, at, number, held) -> None:
        if (at.index, number) != (task, round_):
            return whole(self, at, number, held)
        first = np.arange(len(held.labelled)) == np.flatnonzero(held.labelled)[0]
        whole(self, at, number, replace(held, labelled=held.labelled * first))  # one client's turn, and no further
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.Federation, "_round", until)
        with pytest.raises(KeyboardInterrupt):
            yield


def without_seconds(outcome: Outcome, name: str) -> pd.DataFrame:
    table = pd.read_csv(outcome.folder / name)
    return table[[column for column in table if "seconds" not in column]]


def assert_same_result(first: Outcome, second: Outcome) -> None:
    for name in EXACT:
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes(), name
    assert {entry.name for entry in first.folder.iterdir()} == {entry.name for entry in second.folder.iterdir()}
    for name in ("uploads.csv", "tasks.csv"):
        pd.testing.assert_frame_equal(without_seconds(first, name), without_seconds(second, name))
    for name in ("drift.csv", "bounds.csv", "rounds.csv", "routing_matrix.csv"):
        if (first.folder / name).exists():
            assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes(), name
    for part in ("metrics", "task_aware", "routing", "communication", "bounds", "drift", "rounds", "report", "labels"):
        assert json.dumps(first.record[part]) == json.dumps(second.record[part]), part


def resumed(out: Path, overrides: tuple[str, ...], caplog, told: str) -> Outcome:
    """The same command again; `told` is where it must say that it goes on."""
    caplog.clear()
    with caplog.at_level("INFO"):
        outcome = run_in(out, *overrides)
    assert [record.message for record in caplog.records if "going on" in record.message] == [f"going on after {told}"]
    assert not outcome.was_complete
    return outcome


@pytest.mark.slow_cases(
    "centralised, no restart-2-0-task 2 of 3",
    "centralised-1-0-task 1 of 3",
    "fedavg-0-2-task 0 of 3, round 2",
    "fedavg-2-2-task 2 of 3, round 2",
    "fedprotip, updated-1-4-task 1 of 3, round 4",
    "fedprotip, updated-2-0-task 2 of 3",
    "fedprotip-1-1-task 1 of 3",
    "fedprotip-1-3-task 1 of 3, round 2",
    "fedprotip-1-4-task 1 of 3, round 4",
    "fot-1-3-task 1 of 3, round 2",
)
@pytest.mark.parametrize(
    ("method", "task", "round_", "told"),
    [
        ("fedavg", 0, 2, "task 0 of 3, round 2"),
        ("fedavg", 2, 2, "task 2 of 3, round 2"),
        ("fedprotip", 1, 1, "task 1 of 3"),
        ("fedprotip", 1, 3, "task 1 of 3, round 2"),  # the bases, of which none is in yet
        ("fedprotip", 1, 4, "task 1 of 3, round 4"),  # between bases and references
        ("fedprotip, updated", 2, 0, "task 2 of 3"),
        ("fedprotip, updated", 1, 4, "task 1 of 3, round 4"),  # recorded in the bases' round, needed in the next
        ("fot", 1, 3, "task 1 of 3, round 2"),
        ("centralised", 1, 0, "task 1 of 3"),
        ("centralised, no restart", 2, 0, "task 2 of 3"),
    ],
)
def test_interrupted_and_resumed_is_uninterrupted(
    whole, images, tmp_path, monkeypatch, caplog, method, task, round_, told
):
    """In the middle of a round, with the last checkpoint two rounds ago, or one, or right after a task."""
    overrides = (*choice(method, images), "checkpoint_rounds=2")
    with interrupted(task, round_, monkeypatch):
        run_in(tmp_path, *overrides)
    assert not list(tmp_path.rglob("run.json"))
    assert_same_result(resumed(tmp_path, overrides, caplog, told), whole(method))


@pytest.mark.slow_cases("fedavg", "fedprotip")
@pytest.mark.parametrize("method", ["fedavg", "fedprotip", "centralised"])
def test_killed_between_the_last_task_and_the_record_nothing_is_learnt_twice(
    whole, images, tmp_path, monkeypatch, caplog, method
):
    def killed(*_):
        raise KeyboardInterrupt

    expected = whole(method)
    with monkeypatch.context() as patch:
        patch.setattr("fcl_bench.execution.run.RunFolder.write", killed)
        with pytest.raises(KeyboardInterrupt):
            run_in(tmp_path, *choice(method, images))
    monkeypatch.setattr(engine.Federation, "_learn", killed)
    assert_same_result(resumed(tmp_path, choice(method, images), caplog, "task 3 of 3"), expected)


@pytest.mark.slow
def test_interrupted_again_and_again_it_still_ends_the_same(whole, images, tmp_path, monkeypatch, caplog):
    overrides = (*choice("fedprotip", images), "checkpoint_rounds=1")
    for task, round_ in ((0, 1), (1, 3), (2, 4)):
        with interrupted(task, round_, monkeypatch):
            run_in(tmp_path, *overrides)
    assert_same_result(resumed(tmp_path, overrides, caplog, "task 2 of 3, round 4"), whole("fedprotip"))


@pytest.mark.slow
def test_a_damaged_checkpoint_within_a_task_starts_over(whole, images, tmp_path, monkeypatch, caplog):
    overrides = (*choice("fedavg", images), "checkpoint_rounds=1")
    with interrupted(1, 2, monkeypatch):
        run_in(tmp_path, *overrides)
    [file] = tmp_path.rglob("checkpoint/*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    outcome = run_in(tmp_path, *overrides)
    assert "starting from the first task" in caplog.text
    assert_same_result(outcome, whole("fedavg"))


@pytest.mark.parametrize("method", list(METHODS))
def test_every_round_of_every_client_is_a_row(whole, method):
    uploads = pd.read_csv(whole(method).folder / "uploads.csv")
    assert len(uploads) == 3 * 3 * ROUNDS[method]
    assert not uploads.duplicated(["task", "round", "client"]).any()
    assert uploads[uploads["round"] == 0].groupby("task").samples.sum().tolist() == [24, 24, 24]
    stages = {"fedprotip": ["bases", "model", "references"], "fot": ["bases", "model"], "fedavg": ["model"]}
    assert sorted(uploads.stage.unique()) == stages.get(method.partition(",")[0], ["samples"])
    assert sorted(whole(method).record["communication"]["by_stage"]) == sorted(uploads.stage.unique())


@pytest.mark.slow_cases("fedprotip")
@pytest.mark.parametrize("method", ["fedavg", "fedprotip", "centralised"])
def test_a_run_depends_on_nobodys_generator_and_leaves_it_where_it_was(whole, images, tmp_path, method):
    torch.manual_seed(12345)
    np.random.seed(12345)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    outcome = run_in(tmp_path, *choice(method, images))
    after = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    assert_same_result(outcome, whole(method))
    assert torch.equal(after[0], before[0])
    assert np.array_equal(after[1], before[1])


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("checkpoint_rounds=1", True),
        ("method.training.rounds=4", False),
        ("method.training.lr=0.02", False),
        ("method.frozen_heads=false", False),
        ("drift=5", False),
        ("evaluate_rounds=2", False),
        ("backbone.width=5", False),
    ],
)
def test_the_id_covers_what_determines_the_result(whole, images, tmp_path, override, same):
    from fcl_bench.execution.plan import make_plan
    from tests.small_runs import settings_for

    plan = make_plan(settings_for(tmp_path, *choice("fedavg", images), override))
    assert (plan.id == whole("fedavg").record["run_id"]) is same


@pytest.mark.slow
def test_centralised_is_the_ceiling(images, tmp_path):
    """With enough rounds it knows all classes, where fedavg knows those of the last task."""
    longer = ("method.training.rounds=8", "method.training.lr=0.05", "method.training.augment=none")
    joint, floor = (run_in(tmp_path, f"method={name}", *images, *TINY, *longer) for name in ("centralised", "fedavg"))
    assert joint.record["metrics"]["A_T"] > 80
    assert floor.record["metrics"]["A_T"] < 50
    assert floor.record["protocol"] == joint.record["protocol"] == "task-agnostic"


# Rounds ---------------------------------------------------------------------------------------------------------------


def test_what_a_round_cost_stands_beside_its_accuracy(whole):
    """rounds.csv and uploads.csv count rounds alike: bytes and seconds up to each round are their sums."""
    outcome = whole("fot")
    rows, uploads = (pd.read_csv(outcome.folder / name) for name in ("rounds.csv", "uploads.csv"))
    assert list(rows) == ["task", "round", "accuracy"]
    assert rows[["task", "round"]].to_numpy().tolist() == [[t, r] for t in range(3) for r in (1, 3)]
    spent = uploads.groupby(["task", "round"])[["up_bytes", "client_seconds"]].sum().cumsum()
    joined = rows.join(spent, on=["task", "round"])
    assert joined["up_bytes"].iloc[-1] == outcome.record["communication"]["up_total_bytes"]
    assert joined["client_seconds"].iloc[-1] == pytest.approx(outcome.record["runtime"]["client_seconds"])
    assert joined["up_bytes"].is_monotonic_increasing


def test_the_best_round_stands_beside_the_last_and_never_for_it(whole):
    record = whole("fedavg").record
    rows = pd.read_csv(whole("fedavg").folder / "rounds.csv")
    assert rows.groupby("task")["accuracy"].last().tolist() == record["metrics"]["accuracy"]
    own = [part.sort_values("accuracy", ascending=False, kind="stable").iloc[0] for _, part in rows.groupby("task")]
    best = {"best": [row["accuracy"] for row in own], "best_round": [int(row["round"]) for row in own]}
    assert record["rounds"] == {"every": 1, **best}


def test_without_evaluate_rounds_there_is_no_trace_of_it(whole):
    outcome = whole("centralised")
    assert outcome.record["rounds"] is None
    assert not list(outcome.folder.glob("rounds*"))


# Drift ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedprotip", "centralised"])
def test_drift_has_its_table_and_its_place_in_the_record(whole, method):
    """That it survives a resume, `test_interrupted_and_resumed_is_uninterrupted` shows."""
    outcome = whole(method)
    rows = pd.read_csv(outcome.folder / "drift.csv")
    assert list(rows) == ["task", "reference_task", "client", "samples", "drift", "norm"]
    assert sorted(zip(rows.task, rows.reference_task, strict=True))[0] == (0, 0)
    assert set(zip(rows.task, rows.reference_task, strict=True)) == {(s, t) for s in range(3) for t in range(s + 1)}
    assert (rows.samples <= 4).all()
    parts = np.load(outcome.folder / "partition.npz")
    for row in rows.itertuples():
        assert row.samples == min(4, len(parts[f"train_t{row.reference_task}_c{row.client}"]))
    own = rows[rows.task == rows.reference_task]
    assert (own.drift == 0).all()
    assert (rows[rows.task > rows.reference_task].drift > 0).all()
    assert (rows.norm > 0).all()
    last = rows[rows.task == 2]
    means = [np.average(part.drift, weights=part.samples) for _, part in last.groupby("reference_task")]
    assert outcome.record["drift"]["last"] == pytest.approx(means[:2])
    assert outcome.record["drift"]["mean"] == pytest.approx(np.mean(means[:2]))


@pytest.mark.slow
def test_a_resumed_run_with_drift_has_its_picture(images, tmp_path, monkeypatch, pictures):
    overrides = (*choice("fedprotip", images), "checkpoint_rounds=1")
    with interrupted(2, 1, monkeypatch):
        run_in(tmp_path, *overrides)
    outcome = run_in(tmp_path, *overrides)
    assert {"accuracy.png", "drift.csv"} <= outcome.record["files"].keys()
    with Image.open(outcome.folder / "accuracy.png") as picture:
        assert min(picture.size) > 500


def test_without_drift_there_is_no_trace_of_it(images, tmp_path):
    outcome = run_in(tmp_path, *choice("centralised, no restart", images))
    assert outcome.record["drift"] is None
    assert not list(outcome.folder.glob("drift*"))


@pytest.mark.slow
def test_drift_of_a_single_task_is_measured(images, tmp_path, pictures):
    outcome = run_in(tmp_path, *choice("fedavg", images), "tasks=1", "drift=2")
    assert outcome.record["drift"] == {"last": [], "mean": None}
    assert (pd.read_csv(outcome.folder / "drift.csv").drift == 0).all()


@pytest.mark.parametrize("method", ["afl", "stsa"])
def test_frozen_features_do_not_drift(tmp_path, method):
    path = write_features(tmp_path / "f.npz")
    overrides = (f"method={method}", *(["method.M=32"] if method == "stsa" else []), "drift=3", "clients=2", "tasks=3")
    outcome = run_in(tmp_path, "data=features", f"data.path={path}", *overrides)
    rows = pd.read_csv(outcome.folder / "drift.csv")
    assert len(rows) == 6 * 2
    assert (rows.drift == 0).all()
    assert (rows.norm > 0).all()
    assert outcome.record["drift"] == {"last": [0.0, 0.0], "mean": 0.0}


def test_theory_has_its_table(whole):
    for method in ("fedprotip", "fot"):
        outcome = whole(method)
        rows = pd.read_csv(outcome.folder / "bounds.csv")
        assert len(rows) == 3
        assert (rows[["rho", "rho_min"]] <= 1 + 1e-9).all(axis=None)
        assert rows.rho[0] == pytest.approx(1)  # nothing is protected yet
        assert rows.beta.isna().tolist() == [True, False, False]
