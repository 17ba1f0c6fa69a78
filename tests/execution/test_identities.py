"""Nothing of one run is taken for another's, and nothing that a record names is opened unless it is a file of it."""

from __future__ import annotations

import json
import os
import re
import shutil

import numpy as np
import pytest

from fcl_bench.errors import UserError
from fcl_bench.execution.folder import SCHEMA, RunFolder
from fcl_bench.execution.plan import make_plan
from fcl_bench.files import read_json, write_json
from tests.conftest import write_features
from tests.small_runs import interrupted_in, run_in, settings_for

SMALL = ("method=afl", "tasks=3", "clients=2")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return run_in(tmp_path_factory.mktemp("first"), *SMALL, "seed=1")


def folder_of(out, *overrides):
    return out / "runs" / make_plan(settings_for(out, *overrides)).label


def test_the_record_of_another_run_is_not_taken_for_this_one(first, tmp_path, caplog):
    shutil.copytree(first.folder, folder_of(tmp_path, *SMALL, "seed=2"))
    own = run_in(tmp_path, *SMALL, "seed=2")
    assert f"of another run, {first.record['run_id']}" in caplog.text
    assert own.record["seed"] == 2
    assert own.record["run_id"] != first.record["run_id"]


@pytest.mark.slow
def test_the_checkpoint_of_another_run_is_not_taken_over(tmp_path, monkeypatch, caplog):
    """It was taken over without a word: the first tasks were then those of the other seed."""
    with interrupted_in(2, monkeypatch):
        run_in(tmp_path, *SMALL, "seed=1")
    shutil.copytree(folder_of(tmp_path, *SMALL, "seed=1"), folder_of(tmp_path, *SMALL, "seed=2"))
    copied = run_in(tmp_path, *SMALL, "seed=2").record
    assert "is of another run; starting from the first task" in caplog.text
    assert copied["metrics"] == run_in(tmp_path / "alone", *SMALL, "seed=2").record["metrics"]
    assert run_in(tmp_path, *SMALL, "seed=1").record["seed"] == 1  # its own goes on


@pytest.mark.parametrize("content", ["[]", "{}", "1", "null"])
def test_a_record_that_is_no_record_is_damaged_in_plain_words(first, tmp_path, content, caplog):
    """Of a list it said that list indices must be integers."""
    copied = shutil.copytree(first.folder, tmp_path / "copied")
    (copied / "run.json").write_text(content)
    assert RunFolder(copied).complete_record() is None
    assert caplog.messages == [
        f"run folder {copied} is damaged: it has a damaged run.json (it does not match its own checksum); running again"
    ]


def test_a_folder_of_another_version_is_not_called_damaged(first, tmp_path, caplog):
    copied = shutil.copytree(first.folder, tmp_path / "copied")
    write_json(copied / "run.json", {**read_json(copied / "run.json"), "schema": 4})
    said = f"run folder {copied} is of another version: 4, not {SCHEMA}"
    assert RunFolder(copied).complete_record() is None
    assert caplog.messages == [f"{said}; running again"]
    with pytest.raises(UserError, match=re.escape(said)):
        RunFolder(copied).verified(["config.yaml"])


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", "", "a/b"])
def test_a_record_that_names_other_files_is_damaged(first, tmp_path, name, caplog):
    copied = tmp_path / "copied"
    shutil.copytree(first.folder, copied)
    record = read_json(copied / "run.json")
    write_json(copied / "run.json", {**record, "files": {**record["files"], name: "0"}})
    assert RunFolder(copied).complete_record() is None
    assert "is no file of the folder" in caplog.text


@pytest.mark.parametrize("name", ["tasks.csv", "model.safetensors", "run.json"])
@pytest.mark.parametrize("read", [None, {"tasks.csv"}])
def test_special_files_of_a_record_are_not_opened(first, tmp_path, name, read, caplog):
    copied = tmp_path / "copied"
    shutil.copytree(first.folder, copied)
    (copied / name).unlink()
    os.mkfifo(copied / name)
    assert RunFolder(copied).complete_record(read=read) is None
    assert "it is a FIFO" in caplog.text


@pytest.mark.parametrize("kind", ["FIFO", "folder"])
@pytest.mark.parametrize("name", ["run.json", "config.yaml"])
def test_what_stands_in_a_files_place_does_not_stop_a_run(tmp_path, name, kind):
    """The run is done again, and its files replace whatever was there."""
    place = folder_of(tmp_path, *SMALL) / name
    place.parent.mkdir(parents=True)
    os.mkfifo(place) if kind == "FIFO" else place.mkdir()
    assert run_in(tmp_path, *SMALL).folder.joinpath("run.json").is_file()


@pytest.mark.parametrize("name", ["state.json", "tensors-1.safetensors"])
def test_a_special_file_in_a_checkpoint_is_replaced(tmp_path, name):
    place = folder_of(tmp_path, *SMALL) / "checkpoint" / name
    place.parent.mkdir(parents=True)
    os.mkfifo(place)
    assert run_in(tmp_path, *SMALL).folder.joinpath("run.json").is_file()


@pytest.mark.parametrize("name", ["state.json", "tensors-1.safetensors"])
def test_a_folder_in_place_of_a_checkpoints_file_is_one_line(command, tmp_path, name):
    (folder_of(tmp_path, *SMALL) / "checkpoint" / name).mkdir(parents=True)
    code, _, err = command(*SMALL, f"out={tmp_path}")
    assert code == 2
    assert "Traceback" not in err
    assert f"{name}: Is a directory" in err.splitlines()[-1]


@pytest.mark.parametrize("kind", ["FIFO", "folder"])
def test_a_log_that_is_none_is_told(tmp_path, kind):
    place = folder_of(tmp_path, *SMALL) / "run.log"
    place.parent.mkdir(parents=True)
    os.mkfifo(place) if kind == "FIFO" else place.mkdir()
    with pytest.raises(UserError, match=rf"run\.log is a {kind} \(remove it"):
        run_in(tmp_path, *SMALL)


def test_a_refused_run_leaves_no_folder(tmp_path):
    """Refused after its folder was made, since the features are looked at then."""
    rng = np.random.default_rng(0)
    path = write_features(
        tmp_path / "tiny.npz", x_train=1e160 * rng.random((240, 12)), x_test=1e160 * rng.random((60, 12))
    )
    keys = ("data=features", f"data.path={path}", "method=stsa", "method.M=32", "clients=2")
    with pytest.raises(UserError, match="overflow"):
        run_in(tmp_path / "out", *keys)
    assert [entry.name for entry in (tmp_path / "out" / "runs").iterdir()] == [".locks"]


def test_a_refused_run_keeps_what_an_earlier_one_left(first, tmp_path, monkeypatch):
    with interrupted_in(2, monkeypatch):
        run_in(tmp_path, *SMALL)
    monkeypatch.setattr("fcl_bench.execution.run.prepare_inputs", refuse)
    with pytest.raises(UserError, match="no"):
        run_in(tmp_path, *SMALL)
    assert (folder_of(tmp_path, *SMALL) / "checkpoint" / "state.json").exists()


def refuse(*_):
    raise UserError("no", "yes")


def test_every_record_says_whose_it_is(first):
    assert first.folder.name.endswith(json.loads((first.folder / "run.json").read_text())["run_id"])


def test_a_sealed_record_whose_owner_is_no_text_is_damaged(tmp_path, caplog):
    done = run_in(tmp_path, *SMALL)
    file = done.folder / "run.json"
    record = json.loads(file.read_text())
    write_json(file, {name: value for name, value in record.items() if name != "checksum"} | {"run_id": True})
    again = run_in(tmp_path, *SMALL)
    assert "(of another run, True); running again" in caplog.text
    assert again.record["metrics"] == record["metrics"]
    assert json.loads(file.read_text())["run_id"] == done.record["run_id"]
