"""Run folders as a data frame, and the choice of some of them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from fcl_bench.config import text
from fcl_bench.errors import UserError
from fcl_bench.execution.folder import SCHEMA, RunFolder
from fcl_bench.files import file_checksum, remove, write_json
from fcl_bench.results.collect import RUN_COLUMNS, collect, mixed, of_sweep, selected
from fcl_bench.results.measures import MEASURES
from fcl_bench.results.summarise import summarise, used_runs
from tests.results.frames import made_up, real_runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return real_runs(tmp_path_factory.mktemp("out")) / "runs"


@pytest.fixture
def runs(finished, tmp_path):
    """A copy of the runs to damage."""
    return shutil.copytree(finished, tmp_path / "runs", ignore=shutil.ignore_patterns(".index.json"))


def rewrite(folder, record, config=None):
    """Put a record, and perhaps a configuration, into a run folder, with the checksums right."""
    if config is not None:
        (folder / "config.yaml").write_text(config)
        record["files"]["config.yaml"] = file_checksum(folder / "config.yaml")
    write_json(folder / "run.json", record)


def test_a_row_holds_what_the_record_and_the_configuration_say(finished):
    frame = collect(finished)
    assert list(frame["seed"].sort_values()) == [0, 1]
    for _, row in frame.iterrows():
        record = json.loads((finished / row["folder"] / "run.json").read_text())
        for key in ("run_id", "method", "data", "backbone", "split", "partition", "beta", "clients", "tasks"):
            assert row[key] == record[key]
        for key in ("A_avg", "A_T", "forgetting"):
            assert row[key] == record["metrics"][key]
        for key in ("seconds_per_task", "client_seconds", "server_seconds"):
            assert row[key] == record["runtime"][key]
        assert row["up_max_mib"] * 2**20 == record["communication"]["up_max_bytes"]
        assert row["down_max_mib"] * 2**20 == record["communication"]["down_max_bytes"]
        assert row["up_total_max_mib"] * 2**20 == record["communication"]["up_total_max_bytes"]
        assert (row["client_storage_mib"], row["client_samples_kept"]) == (0, 0)
        assert row["peak_memory_mib"] * 2**20 == record["runtime"]["peak_memory_bytes"]
        for key in ("A_T_tasks", "stability", "plasticity", "retention", "forgetting_fedprotip"):
            assert row[key] == record["metrics"][key]
        assert row["fedran_mib"] == record["communication"]["accounting"]["fedran_mib"]
        assert (row["method.M"], row["method.rank"], row["method.ridge"]) == (32, 8, 0.001)
        assert (row["method.budget_bytes"], row["wire.dtype"], row["dtype"]) == ("null", "float32", "float64")
        assert row["method.revision"] == str(record.get("method_revision", "unknown"))
        assert (row["device"], row["label_rate"]) == (record["environment"]["device"], 1)
    assert not [column for column in frame if column.endswith("_target_")]
    assert {"out", "force", "cache.dir", "data.name"}.isdisjoint(frame.columns)


def test_runs_that_differ_only_in_seed_share_every_other_column_of_the_configuration(finished):
    frame = collect(finished).drop(columns=[*MEASURES, *RUN_COLUMNS])
    assert (frame.nunique(dropna=False) == 1).all()


def test_runs_by_another_version_are_left_out_with_a_warning_each(runs, caplog):
    """Such as those whose configuration names classes that have moved since."""
    for folder in runs.glob("fedran*"):
        record = {**json.loads((folder / "run.json").read_text()), "schema": 3}
        rewrite(folder, record, "method: {_target_: fcl_bench.gone.Gone}\n")
    assert collect(runs).empty
    assert [message.partition("is of ")[2] for message in caplog.messages] == [
        f"another version: 3, not {SCHEMA}; leaving it out"
    ] * 2


def test_damaged_runs_are_left_out_aloud_and_incomplete_ones_silently(runs, caplog):
    first, second = sorted(runs.glob("fedran*"))
    (runs / "fedran-digits-pixels-0" / "checkpoint").mkdir(parents=True)
    (first / "tasks.csv").write_text("")
    assert collect(runs)["folder"].tolist() == [second.name]
    [warning] = caplog.messages
    assert "tasks.csv does not match its checksum; leaving it out" in warning
    (second / "run.json").write_text("{")
    assert collect(runs).empty
    assert "damaged run.json" in caplog.text
    assert collect(runs / "nowhere").empty


@pytest.mark.parametrize(
    ("name", "put", "told"),
    [
        ("run.json", Path.mkdir, "it is a folder"),
        ("run.json", os.mkfifo, "it is a FIFO"),
        ("uploads.csv", lambda path: path.symlink_to("nowhere"), " lacks "),
        ("uploads.csv", Path.mkdir, "it is a folder"),
    ],
)
def test_a_run_folder_with_something_else_in_a_files_place_is_left_out_aloud(runs, caplog, name, put, told):
    """Opening a FIFO would wait for ever; one odd folder does not take the other runs from a table."""
    first, second = sorted(runs.glob("fedran*"))
    for _ in range(2):  # without an index, and with one that has the run
        for path in (first / name, second / name):
            assert path.is_file()
        (first / name).rename(runs / "aside")
        put(first / name)
        assert collect(runs)["folder"].tolist() == [second.name]
        [warning] = caplog.messages
        assert str(first) in warning
        assert told in warning
        caplog.clear()
        remove(first / name)
        (runs / "aside").rename(first / name)
        assert len(collect(runs)) == 2


@pytest.mark.parametrize(
    ("value", "typed"),
    [
        *((0.1, "0.1"), (1.0, "1"), (2048, "2048"), (4278272.0, "4278272"), (1e-5, "1e-05"), (1 / 3, repr(1 / 3))),
        *((True, "true"), (np.float64(0.5), "0.5"), ("null", "null"), ("floor", "floor")),
        *((np.True_, "true"), (np.int64(7), "7"), (np.float64("inf"), "inf")),
        *((np.nan, ""), (None, ""), (pd.NA, "")),
    ],
)
def test_values_read_as_they_are_typed(value, typed):
    assert text(value) == typed


def test_runs_are_read_again_only_if_a_file_has_changed(runs, monkeypatch):
    """The index beside the runs gives the same frame, to the type of each value, and decides by what files say."""
    asked = []
    read = RunFolder.complete_record

    def counted(folder, **given):
        asked.append(folder.path.name)
        return read(folder, **given)

    monkeypatch.setattr(RunFolder, "complete_record", counted)
    first = collect(runs)
    folders = sorted(asked)
    assert len(folders) == len(first) == 2
    asked.clear()
    again = collect(runs)
    pd.testing.assert_frame_equal(first, again)
    assert [[type(value) for value in row] for row in again.to_numpy(object)] == [
        [type(value) for value in row] for row in first.to_numpy(object)
    ]
    assert not asked
    # Other measures than those of the index are read anew, and the index stays.
    assert "S_2" in collect(runs, ["S_2"])
    asked.clear()
    os.utime(runs / folders[0] / "tasks.csv", ns=(1, 1))
    shutil.rmtree(runs / folders[1])
    assert list(collect(runs)["folder"]) == folders[:1]
    assert asked == folders[:1]


def test_a_record_of_the_same_size_and_time_is_another_by_its_seal(runs):
    folder = runs / collect(runs)["folder"][0]
    before = (folder / "run.json").stat()
    record = json.loads((folder / "run.json").read_text())
    record["environment"]["git_commit"] = "0" * len(record["environment"]["git_commit"] or "")
    rewrite(folder, record)
    os.utime(folder / "run.json", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (folder / "run.json").stat().st_size == before.st_size
    assert collect(runs)["git_commit"][0] == record["environment"]["git_commit"]


def test_runs_in_the_index_are_of_another_version_once_that_is_raised(runs, monkeypatch):
    assert len(collect(runs)) == 2
    for module in ("execution.folder", "results.collect"):
        monkeypatch.setattr(f"fcl_bench.{module}.SCHEMA", SCHEMA + 1)
    assert collect(runs).empty


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "[1, {}]", "\xff", '["other code", {"a": [[], {}]}]', "{}", "null", "[CODE, null]"),
        *('[CODE, {"RUN": 5}]', '[CODE, {"RUN": [[]]}]', '[CODE, {"RUN": [[], 5]}]', "[CODE, [1]]"),
    ],
)
def test_an_index_that_does_not_fit_is_made_again(runs, content):
    first = collect(runs)
    made = (runs / ".index.json").read_bytes()
    content = content.replace("CODE", json.dumps(json.loads(made)[0])).replace("RUN", first["folder"][0])
    (runs / ".index.json").write_bytes(content.encode("latin-1"))
    pd.testing.assert_frame_equal(first, collect(runs))
    assert (runs / ".index.json").read_bytes() == made


def test_runs_in_a_folder_without_room_for_an_index_are_collected(runs, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fcl_bench.results.collect.replacing", full)
    assert len(collect(runs)) == len(list(runs.glob("*/run.json")))
    assert not (runs / ".index.json").exists()


@pytest.fixture
def choice():
    return made_up(
        {"method_rank": 8, "seed": 0, "steps": "[1, 2]", "origin": "a, b"},
        {"method_rank": 32, "seed": 1, "beta": 1.0, "steps": "[]", "origin": "c"},
        {"method": "stsa", "seed": 2, "beta": "null", "origin": "c"},
    )


@pytest.mark.parametrize(
    ("conditions", "seeds"),
    [
        ([], [0, 1, 2]),
        (["method=fedran"], [0, 1]),
        (["method=fedran,stsa", "beta=1.0"], [1]),
        (["beta=0.10,null"], [0, 2]),
        (["method.rank=8,32"], [0, 1, 2]),  # STSA has no rank
        (["method=fedran", "method.rank=8"], [0]),
        (["seed=2"], [2]),
        (["run_id=run1"], [1]),
        (["steps=[1, 2]"], [0]),
        (["steps=[1,2]"], [0]),
        (["steps=[],[1, 2]"], [0, 1]),
        (["origin=a, b"], [0]),
        (["origin=c"], [1, 2]),
    ],
)
def test_conditions_choose_runs(choice, conditions, seeds):
    assert selected(choice, conditions)["seed"].tolist() == seeds


@pytest.mark.parametrize(
    ("conditions", "told"),
    [
        (["methd=fedran"], "unknown key methd (did you mean method or method.rank? choices: beta, clients, data,"),
        (["rank=8"], "unknown key rank (did you mean method.rank?"),
        (["A_avg=80"], "unknown key A_avg (choices: beta"),
        (["method.rank=8,9"], "no run has method.rank=9 (choices: 32, 8)"),
        (["method=stsa", "method.rank=8"], "no run has method.rank=8"),
        (["method=fedrn"], "no run has method=fedrn (did you mean fedran? choices: fedran, stsa)"),
        (["method"], "--where method is not KEY=VALUE"),
        (["method="], "--where method= is not KEY=VALUE"),
    ],
)
def test_a_condition_that_cannot_be_met_says_what_could(choice, conditions, told):
    with pytest.raises(UserError) as error:
        selected(choice, conditions)
    assert told in str(error.value)


def test_conditions_on_any_key_of_the_record(finished):
    frame = collect(finished)
    for condition in ("profile=full", "environment.threads=1", "draws_weights=false", "schema=4"):
        key, _, value = condition.partition("=")
        records = [json.loads(path.read_text()) for path in finished.glob("*/run.json")]
        told = [record["environment"]["threads"] if key.startswith("env") else record[key] for record in records]
        expected = sum(text(found) == value for found in told)
        if expected:
            assert len(selected(frame, [condition])) == expected
        else:
            with pytest.raises(UserError, match="no run has"):
                selected(frame, [condition])
    with pytest.raises(UserError, match="unknown key environment.nothing"):
        selected(frame, ["environment.nothing=1"])
    # After another condition, the rows that are left.
    assert selected(frame, ["seed=1", f"schema={SCHEMA}"])["seed"].tolist() == [1]


def test_a_partition_without_a_beta_has_none(runs):
    for folder in runs.glob("fedran*"):
        record = json.loads((folder / "run.json").read_text())
        rewrite(folder, {**record, "partition": "iid", "beta": None})
    summary = summarise(used_runs(collect(runs)))
    assert summary["beta"].isna().all()
    assert len(summary) == 1


def report(folder, number, run):
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    (folder / "jobs" / f"{number}.json").write_text(json.dumps({"run": run}))


def test_the_runs_of_a_sweep_are_those_of_its_reports(runs):
    frame, out = collect(runs), runs.parent
    first, second = sorted(frame["folder"])
    with pytest.raises(UserError, match="holds no sweep"):
        of_sweep(frame, out, "")
    report(out / "sweeps" / "b", 0, f"/elsewhere/runs/{first}")
    report(out / "sweeps" / "b", 1, "")
    report(out / "sweeps" / "a", 0, str(runs / second))
    report(out / "sweeps" / "c", 0, "runs/gone")
    for seconds, name in enumerate("bac"):
        os.utime(out / "sweeps" / name / "jobs", (seconds, seconds))
    assert of_sweep(frame, out, "b")["folder"].tolist() == [first]
    assert of_sweep(frame, out, "")["folder"].tolist() == [second]  # the latest that has any
    with pytest.raises(UserError, match=r"--sweep d is not in .*choices: a, b, c"):
        of_sweep(frame, out, "d")
    with pytest.raises(UserError, match="no complete run of it"):
        of_sweep(frame, out, "c")


def test_what_a_table_mixes_is_told(finished):
    frame = collect(finished)
    assert mixed(frame) == []
    frame["profile"] = ["full", "quick"]
    frame["git_commit"] = ["0123456789abcdef", None]
    assert mixed(frame) == [
        "These runs mix profiles: full (1), quick (1); --where profile=VALUE takes one.",
        "These runs mix code revisions: 0123456789abcdef (1), unknown (1); --where git_commit=VALUE takes one.",
    ]


def test_a_code_revision_is_chosen_by_what_the_line_shows(finished):
    frame = collect(finished)
    dirty = f"{'0123456789' * 4}-dirty"
    frame["git_commit"] = [dirty, None]
    [line] = mixed(frame)
    assert f"{dirty} (1), unknown (1)" in line
    for value, expected in ((dirty, frame["seed"][0]), ("unknown", frame["seed"][1])):
        assert selected(frame, [f"git_commit={value}"])["seed"].tolist() == [expected]


def test_how_processes_met_is_no_setting(runs):
    """One seed over Flower and one in a process are two of one setting; those of a tree, which adds otherwise, not."""
    first = sorted(runs.glob("fedran*"))[0]
    for transport, settings in (
        ({"_target_": "x.OverFlower", "link": "a:1", "ca": "f", "minimum": None, "deadline": None}, 1),
        ({"_target_": "x.OverRanks"}, 1),
        ({"_target_": "x.OverFlower", "link": "a:1", "ca": None, "minimum": 0.5, "deadline": None}, 2),
        ({"_target_": "x.ThroughTree", "fan_in": 2}, 2),
    ):
        config = yaml.safe_load((first / "config.yaml").read_text()) | {"transport": transport}
        rewrite(first, json.loads((first / "run.json").read_text()), yaml.safe_dump(config))
        assert len(summarise(used_runs(collect(runs)))) == settings, transport
