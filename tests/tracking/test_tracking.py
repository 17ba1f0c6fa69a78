"""Trackers: off by default, no part of a run, told each task once more than never."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from fcl_bench.composition import config_dir
from fcl_bench.config import target_class
from fcl_bench.errors import UserError
from fcl_bench.execution.run import Outcome, run
from fcl_bench.tracking import NoTracking, TrackedRun, flat, load_tracking, numbers
from tests.conftest import write_features
from tests.small_runs import interrupted_in, settings_for

TASKS = 3
SMALL = ("data=features", "method.M=16", "method.rank=8", f"tasks={TASKS}", "clients=2", "cache.enabled=false")
CHOICES = sorted(file.stem for file in config_dir().glob("logger/*.yaml"))


def chosen(name: str, out: Path, **knobs: Any) -> Any:
    """`logger=<name>` as the YAML has it."""
    node = yaml.safe_load((config_dir() / "logger" / f"{name}.yaml").read_text())
    return load_tracking(OmegaConf.create({"out": str(out), "logger": {**node, **knobs}}))


def tracked(name: str, out: Path, *overrides: str, **knobs: Any) -> Outcome:
    data = out / "f.npz"
    if not data.exists():
        out.mkdir(exist_ok=True)
        write_features(data)
    return run(settings_for(out, *SMALL, f"data.path={data}", *overrides), chosen(name, out, **knobs))


def interrupted_in_its_last_task(name: str, out: Path, monkeypatch: pytest.MonkeyPatch, **knobs: Any) -> None:
    with interrupted_in(TASKS - 1, monkeypatch):
        tracked(name, out, **knobs)


def checked(points: dict[int, float], outcome: Outcome) -> None:
    """One value a task, that of the record."""
    assert sorted(points) == list(range(TASKS))
    assert [points[t] for t in range(TASKS)] == pytest.approx(outcome.record["metrics"]["accuracy"], rel=1e-6)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_lists_its_knobs_and_opens_its_comment(choice, tmp_path):
    text = (config_dir() / "logger" / f"{choice}.yaml").read_text()
    node = yaml.safe_load(text)
    fields = target_class("logger", node.pop("_target_")).__dataclass_fields__
    assert list(node) == list(fields)
    assert text.startswith("# ")
    assert type(chosen(choice, tmp_path)).__name__.lower() in {choice, "notracking"}


def test_nothing_is_tracked_unless_asked(tmp_path):
    assert load_tracking(OmegaConf.create({"seed": 0})) == NoTracking()
    tracked("none", tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["f.npz", "runs"]


@pytest.mark.slow
def test_a_tracker_has_no_bearing_on_the_run(tmp_path):
    pytest.importorskip("tensorboard")
    plain, told = tracked("none", tmp_path / "a"), tracked("tensorboard", tmp_path / "b")
    assert plain.folder.name == told.folder.name
    for name in ("model.safetensors", "partition.npz", "accuracy_matrix.csv"):
        assert (plain.folder / name).read_bytes() == (told.folder / name).read_bytes()
    assert {entry.name for entry in plain.folder.iterdir()} == {entry.name for entry in told.folder.iterdir()}


@dataclass
class Notes:
    """A tracker that writes down what it hears."""

    heard: list[Any] = field(default_factory=list)

    def start(self, run: TrackedRun) -> Notes:
        self.heard.append(("start", run.tasks_done, run.fresh, run.config))
        return self

    def task(self, metrics: dict[str, float], step: int) -> None:
        self.heard.append(("task", step, metrics))

    def finish(self, metrics: dict[str, float]) -> None:
        self.heard.append(("finish", metrics))

    def close(self) -> None:
        self.heard.append(("close",))


def told(notes: Notes) -> list[Any]:
    return [note[:2] if note[0] in ("start", "task") else note[:1] for note in notes.heard]


def test_what_a_tracker_hears_of_a_run(tmp_path):
    notes = Notes()
    whole = settings_for(tmp_path, *SMALL, f"data.path={write_features(tmp_path / 'f.npz')}")
    record = run(whole, notes).record
    assert told(notes) == [("start", 0), ("task", 0), ("task", 1), ("task", 2), ("finish",), ("close",)]
    (_, _, fresh, config), *tasks, (_, last), _ = notes.heard
    assert (fresh, config["seed"], config["method.M"]) == (False, 0, 16)
    assert not any("path" in name or name == "out" for name in config)
    assert [metrics["accuracy"] for _, _, metrics in tasks] == record["metrics"]["accuracy"]
    assert [metrics["classes_seen"] for _, _, metrics in tasks] == [2, 4, 6]
    assert sum(metrics["up_bytes"] for _, _, metrics in tasks) == record["communication"]["up_total_bytes"]
    assert last["metrics/A_T"] == record["metrics"]["A_T"]
    assert last["communication/up_max_bytes"] == record["communication"]["up_max_bytes"]
    assert run(whole, notes).was_complete
    assert told(notes)[-1] == ("close",)
    assert len(notes.heard) == TASKS + 3  # nothing was run, nothing is told


def test_a_run_that_is_killed_between_telling_and_keeping_tells_again(tmp_path, monkeypatch):
    notes = Notes()
    whole = settings_for(tmp_path, *SMALL, f"data.path={write_features(tmp_path / 'f.npz')}")
    from fcl_bench.engine.checkpoint import Checkpoint

    save, calls = Checkpoint.save, []

    def killed(self: Checkpoint, *given: Any) -> None:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        save(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            run(whole, notes)
    assert told(notes) == [("start", 0), ("task", 0), ("task", 1), ("close",)]
    run(whole, notes)
    assert told(notes)[4:] == [("start", 1), ("task", 1), ("task", 2), ("finish",), ("close",)]


@pytest.mark.slow
def test_rounds_within_a_task_are_not_told(tmp_path):
    notes = Notes()
    training = (
        "method=fedavg",
        "backbone=tiny",
        "backbone.width=4",
        "data=digits",
        "method.training.rounds=2",
        "checkpoint_rounds=1",
    )
    run(settings_for(tmp_path, *training, "tasks=2", "clients=2", "method.training.epochs=1"), notes)
    assert [step for kind, step, *_ in (n for n in notes.heard if n[0] == "task")] == [0, 1]


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_has_a_point_a_task_whatever_was_interrupted(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    interrupted_in_its_last_task("tensorboard", tmp_path, monkeypatch)
    outcome = tracked("tensorboard", tmp_path)
    found = events(tmp_path / "tensorboard" / outcome.folder.name)
    checked({event.step: event.value for event in found.Scalars("task/accuracy")}, outcome)
    assert len(found.Scalars("task/accuracy")) == TASKS
    [last] = found.Scalars("record/metrics/A_T")
    assert last.value == pytest.approx(outcome.record["metrics"]["A_T"])
    [text] = {event.tensor_proto.string_val[0].decode() for event in found.Tensors("config/text_summary")}
    assert "| method.M | 16 |" in text
    # A repetition replaces what was there.
    again = tracked("tensorboard", tmp_path, "force=true")
    found = events(tmp_path / "tensorboard" / again.folder.name)
    assert len(found.Scalars("task/accuracy")) == TASKS
    assert len(found.Scalars("record/metrics/A_T")) == 1


def test_tensorboard_has_the_first_task_once_though_it_was_told_twice(tmp_path, monkeypatch):
    """A run that is killed before its first checkpoint, or whose checkpoint is lost, starts from its first task."""
    pytest.importorskip("tensorboard")
    from fcl_bench.engine.checkpoint import Checkpoint

    def killed(self: Checkpoint, *given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            tracked("tensorboard", tmp_path)
    outcome = tracked("tensorboard", tmp_path)
    points = events(tmp_path / "tensorboard" / outcome.folder.name).Scalars("task/accuracy")
    assert [point.step for point in points] == list(range(TASKS))


def test_mlflow_has_one_run_whatever_was_interrupted(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("alembic")
    monkeypatch.chdir(tmp_path)
    store = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow.MlflowClient(store)
    interrupted_in_its_last_task("mlflow", tmp_path, monkeypatch)
    experiment = client.get_experiment_by_name("fcl-bench").experiment_id
    [before] = client.search_runs([experiment])
    assert before.info.status == "KILLED"
    outcome = tracked("mlflow", tmp_path)
    [found] = client.search_runs([experiment])
    assert (found.info.run_id, found.info.status) == (before.info.run_id, "FINISHED")
    assert found.info.run_name == outcome.folder.name
    assert (found.data.params["method.M"], found.data.params["tasks"]) == ("16", "3")
    points = client.get_metric_history(found.info.run_id, "task/accuracy")
    checked({point.step: point.value for point in points}, outcome)
    assert found.data.metrics["metrics/A_T"] == pytest.approx(outcome.record["metrics"]["A_T"])
    # A repetition is a run of its own; the earlier one stays.
    tracked("mlflow", tmp_path, "force=true")
    assert len(client.search_runs([experiment])) == 2
    assert not (tmp_path / "mlruns").exists()


def offline_records(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log, whose blocks of 32 KiB hold pieces with a header of 7 bytes each."""
    block, position, parts = 32768, 7, b""  # the file's own header comes first
    while position + 7 <= len(content):
        if (left := block - position % block) < 7:
            position += left
            continue
        size, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        parts += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield parts
            parts = b""


def test_wandb_keeps_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    outcome = tracked("wandb", tmp_path)
    [folder] = (tmp_path / "wandb").glob("**/offline-run-*")
    [log] = folder.glob("*.wandb")
    assert log.stem == f"run-{outcome.record['run_id']}"
    from wandb.proto import wandb_internal_pb2

    points, last = {}, {}
    for data in offline_records(log.read_bytes()):
        entry = wandb_internal_pb2.Record()
        entry.ParseFromString(data)
        items = {item.key or "/".join(item.nested_key): item.value_json for item in entry.history.item}
        if "task/step" in items:
            points[json.loads(items["task/step"])] = json.loads(items["task/accuracy"])
        last |= {item.key or "/".join(item.nested_key): item.value_json for item in entry.summary.update}
    checked(points, outcome)
    assert json.loads(last["metrics/A_T"]) == pytest.approx(outcome.record["metrics"]["A_T"])


@pytest.mark.parametrize(
    ("choice", "package"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_a_tracker_that_is_not_installed_is_told(tmp_path, monkeypatch, choice, package):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(package), *sys.meta_path])
    with pytest.raises(UserError) as error:
        tracked(choice, tmp_path)
    assert str(error.value) == (
        f"logger={choice}: {choice} is not installed "
        "(logger=none, or in the checkout of fcl-bench: pip install '.[logger]')"
    )


def test_a_logger_that_is_refused_leaves_no_file_of_the_run(tmp_path, monkeypatch):
    """It left the run's lock in runs/.locks."""
    monkeypatch.setattr(sys, "meta_path", [Missing("wandb"), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="wandb is not installed"):
        tracked("wandb", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["f.npz"]


class Missing:
    """An import system that lacks one package."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == self._package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=self._package)


@pytest.mark.parametrize(
    ("choice", "knobs", "error"),
    [
        ("mlflow", {"uri": "mlruns"}, r"logger\.uri=mlruns is not a store \(sqlite:///FILE or http://SERVER\)"),
        ("wandb", {"mode": "ofline"}, r"logger\.mode=ofline is not known \(did you mean offline"),
        ("wandb", {"project": ""}, r"logger\.project is empty"),
        ("tensorboard", {"logdir": "x"}, r"unknown key logger\.logdir"),
    ],
)
def test_wrong_knobs_are_told(tmp_path, choice, knobs, error):
    with pytest.raises(UserError, match=error):
        chosen(choice, tmp_path, **knobs)


@pytest.mark.parametrize("choice", CHOICES)
def test_the_command_takes_every_choice(choice, tmp_path, command):
    """Composed as a user types it, and no part of what the run is or keeps."""
    package = {"none": "json"}.get(choice, choice)
    pytest.importorskip(package)
    data = write_features(tmp_path / "f.npz")
    code, out, err = command(f"out={tmp_path}", *SMALL, f"data.path={data}", f"logger={choice}")
    assert (code, err) == (0, "")
    folder = Path(out.split("run folder: ")[1].splitlines()[0])
    assert folder.name == settings_name(tmp_path, data)
    assert "logger" not in yaml.safe_load((folder / "config.yaml").read_text())


def settings_name(out: Path, data: Path) -> str:
    from fcl_bench.execution.plan import make_plan

    return make_plan(settings_for(out, *SMALL, f"data.path={data}")).label


leaves = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text("ab", max_size=2))
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xy", min_size=1), inner)
)


@settings(max_examples=20)
@given(st.dictionaries(st.text("xy", min_size=1), trees))
def test_flat_keeps_every_leaf_under_a_name_of_its_own(tree):
    def count(node: Any) -> int:
        if isinstance(node, dict | list):
            return sum(map(count, node.values() if isinstance(node, dict) else node))
        return 1

    def look_up(name: str) -> Any:
        node: Any = tree
        for part in name.split("/"):
            node = node[int(part)] if isinstance(node, list) else node[part]
        return node

    names = flat(tree)
    assert len(names) == count(tree)
    assert all(look_up(name) is value for name, value in names.items())
    assert all(math.isfinite(value) for value in numbers(tree).values())
    kept = [value for value in names.values() if isinstance(value, int | float) and not isinstance(value, bool)]
    assert len(numbers(tree)) == sum(math.isfinite(value) for value in kept)
