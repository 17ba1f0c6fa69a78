"""Ways to fool a cell beside a printed number: none of them fills it as if the run had the printed setting."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest
import yaml

from fcl_bench.engine.checkpoint import write_json
from fcl_bench.execution.folder import RunFolder
from fcl_bench.files import file_checksum
from fcl_bench.papers import known
from fcl_bench.papers.known import EDITED, UNKNOWN_CODE, UNKNOWN_DATA, UNKNOWN_WEIGHTS
from fcl_bench.papers.matching import Matcher, overrides, settings_of
from fcl_bench.results.collect import collect
from fcl_bench.results.summarise import used_runs
from tests.conftest import shared
from tests.results.test_paper_tables import DIFFERENCE, NOT_RUN, NOTHING, OURS, by_heading, cell, table_of
from tests.small_runs import run_in

SMALL = ("method=fedran", "method.M=32", "method.rank=8", "tasks=2", "clients=2", "beta=0.1")


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """The folder of runs with one run that has the setting of `cell()`."""
    out = tmp_path_factory.mktemp("honest")
    run_in(out, *SMALL)
    return out / "runs"


@pytest.fixture
def copied(honest, tmp_path):
    """A copy of it, and the run's folder in it."""
    runs = tmp_path / "runs"
    shutil.copytree(honest, runs)
    [record] = runs.glob("*/run.json")
    return runs, record.parent


def resealed(folder, record=None, config=None, samples=None):
    """Edit a run folder and seal it again: its checksums hold."""
    written = json.loads((folder / "run.json").read_text())
    written.pop("checksum")
    for key, value in (record or {}).items():
        *path, last = key.split(".")
        at = written
        for name in path:
            at = at[name]
        at[last] = value
    if config:
        whole = yaml.safe_load((folder / "config.yaml").read_text())
        for key, value in config.items():
            group, _, name = key.rpartition(".")
            (whole[group] if group else whole)[name] = value
        (folder / "config.yaml").write_text(yaml.safe_dump(whole))
    if samples:
        tasks = pd.read_csv(folder / "tasks.csv")
        tasks.loc[0, "test_samples"] += samples
        tasks.to_csv(folder / "tasks.csv", index=False)
    written["files"] = {name: file_checksum(folder / name) for name in written["files"]}
    write_json(folder / "run.json", written)


def shown(runs, *cells):
    return table_of(used_runs(collect(runs)), runs, *(cells or [cell()]))


def test_an_honest_run_fills_its_cell(honest):
    row = by_heading(shown(honest))
    assert row[f"{OURS} (n)"].endswith("(1)")
    assert row[DIFFERENCE] != NOTHING


@pytest.mark.parametrize(
    ("edits", "told"),
    [
        ({"data_fingerprint": "ab" * 16}, {UNKNOWN_DATA, EDITED}),
        ({"environment.device": "cpu2"}, {EDITED}),
        ({"environment.git_commit": None}, {UNKNOWN_CODE}),
        ({"environment.git_commit": "0" * 40 + "-dirty"}, {UNKNOWN_CODE}),
        ({"environment.git_commit": "my branch"}, {UNKNOWN_CODE}),
        ({"features": {"backbone": "pixels", "weights": "cd" * 16}}, {UNKNOWN_WEIGHTS, EDITED}),
        ({"seed": 1}, {EDITED}),
        ({"run_id": "0123456789ab"}, {EDITED}),
    ],
)
def test_a_resealed_record_is_marked_and_neither_bold_nor_compared(copied, edits, told):
    runs, folder = copied
    resealed(folder, edits)
    table = shown(runs)
    [row] = list(table.sheet.rows)
    ours = [own for own, head in zip(row, table.sheet.headers, strict=True) if head.startswith("ours")]
    differences = [own.text for own, head in zip(row, table.sheet.headers, strict=True) if head.startswith("diff")]
    assert [(own.mark, own.number) for own in ours] == [("", None)]
    assert differences == [NOTHING]
    assert all(words in ours[0].text for words in told)
    assert all(words in table.values.loc[0, "state"] for words in told)
    assert not any(isinstance(value, float) for value in table.values.filter(regex="difference$").iloc[0])
    assert all(words in table.runs.loc[0, "differs"] for words in told)


def test_a_marked_run_is_not_averaged_with_an_honest_one(copied):
    """Its seed is another: without the mark there would be two seeds."""
    runs, folder = copied
    shutil.copytree(folder, runs / "another")
    resealed(runs / "another", {"seed": 1, "metrics.A_avg": 100.0})
    table = shown(runs)
    assert table.values[f"{OURS} n"].tolist() == [1, 1]
    assert sorted(state for state in table.values["state"]) == ["run", f"run: {EDITED}"]
    marks = {row[table.sheet.headers.index(f"{OURS} (n)")].mark for row in table.sheet.rows}
    assert "bold" not in marks


def test_a_copied_folder_is_no_second_seed(copied):
    runs, folder = copied
    shutil.copytree(folder, runs / "another-name")
    assert shown(runs).values[f"{OURS} n"].tolist() == [1]


@pytest.mark.parametrize("config", [{"seed": 1}, {"label_rate": 0.5}, {"method.rank": 4}, {"data.validation": 0.2}])
def test_an_edited_configuration_reaches_no_cell_as_its_setting(copied, config):
    runs, folder = copied
    resealed(folder, config=config)
    row = by_heading(shown(runs))
    assert row.get("our runs") == NOT_RUN or EDITED in row[f"{OURS} (n)"]


def test_a_folder_that_is_renamed_to_another_setting_fills_no_cell_of_that_setting(copied):
    runs, folder = copied
    resealed(folder, config={"method.rank": 4})
    row = by_heading(shown(runs, cell(setting="method.M=32 method.rank=4")))
    assert EDITED in row[f"{OURS} (n)"]


@pytest.mark.parametrize("damage", ["run.json", "config.yaml", "tasks.csv"])
def test_a_damaged_or_partial_folder_reaches_no_cell(copied, damage):
    runs, folder = copied
    (folder / damage).write_text((folder / damage).read_text()[:-20])
    assert collect(runs).empty
    (folder / damage).unlink()
    assert collect(runs).empty


@pytest.mark.parametrize(
    ("edits", "samples", "differs"),
    [
        ({"class_samples": [60] * 10}, 0, "train samples 1442, here 600"),
        ({}, -5, "test samples 355, here 350"),
        ({"unseen_test_samples": 7}, 0, "test samples 355, here 362"),
    ],
)
def test_other_numbers_of_samples_are_another_setting(copied, edits, samples, differs):
    runs, folder = copied
    resealed(folder, edits, samples=samples)
    table = shown(runs)
    assert by_heading(table)["our runs"] == NOT_RUN
    assert differs in table.runs.loc[0, "differs"]


def test_a_subset_with_the_right_counts_but_other_images_is_unknown_data(honest, monkeypatch):
    """Digits whose fingerprint is not on the list stand for any other images of the same number."""
    monkeypatch.setattr(
        known, "known", lambda: {"data": {"cifar100": ["cb0cdddf9df2a717ebbd1822a9b4ccfa"]}, "weights": {}}
    )
    row = by_heading(shown(honest))
    assert row[f"{OURS} (n)"].endswith(f"[{UNKNOWN_DATA}]")
    assert row[DIFFERENCE] == NOTHING


@pytest.mark.parametrize("typed", ["data.train_split=test", "data.test_split=train"])
def test_the_other_side_of_the_data_is_another_setting(honest, tmp_path, typed):
    wanted = pd.Series(cell(data="cifar100", backbone="tiny"))
    (tmp_path / "x").mkdir()
    config = settings_of((*overrides(wanted), typed)).resolved
    (tmp_path / "x" / "config.yaml").write_text(json.dumps(config))
    run = used_runs(collect(honest)).assign(data="cifar100", folder="x")
    key, value = typed.split("=")
    default = "train" if "train_" in key else "test"
    matcher = Matcher(run, tmp_path)
    assert list(matcher.differences(wanted).values()) == [[f"{key}={default}, here {value}"]]
    assert matcher.exactly(settings_of(overrides(wanted))) == []


@pytest.mark.parametrize(
    ("backbone", "record", "knows"),
    [
        (("backbone=resnet18",), {"features": {"weights": "known"}}, True),
        (("backbone=resnet18",), {"features": {"weights": "random"}}, False),
        (("backbone=resnet18",), {"features": {}}, False),
        (("backbone=resnet18", "backbone.pretrained=false"), {"features": {"weights": "drawn"}}, True),
        (("backbone=resnet18", "backbone.stem=cifar"), {"features": {"weights": "partly drawn"}}, False),
        (("backbone=resnet18", "backbone.stem=cifar"), {"features": {}, "checkpoint": "known"}, True),
        (("backbone=resnet18", "backbone.stem=cifar"), {"features": {}, "checkpoint": "random"}, False),
        (("backbone=tiny",), {"features": {"weights": "drawn"}}, True),
        (("backbone=pixels",), {"features": {}}, True),
    ],
)
def test_weights_that_are_not_drawn_whole_must_be_on_the_list(monkeypatch, backbone, record, knows):
    settings = settings_of(("method=fedran", "data=cifar100", *backbone))
    monkeypatch.setattr(known, "known", lambda: {"data": {}, "weights": {settings.backbone.name: ["known"]}})
    whole = {"checkpoint": None, "data_fingerprint": "", "run_id": "", "seed": 0}
    whole |= {"environment": {"device": "cpu", "git_commit": "0" * 40}} | record
    assert (UNKNOWN_WEIGHTS not in known.doubts(whole, settings)) == knows


@pytest.mark.slow
def test_the_list_has_what_is_loaded_here():
    for typed in (("data=digits",), ("data=cifar100", f"data.path={shared('data/cifar100')}")):
        source = settings_of(("method=afl", *typed)).data
        dataset = source.load()
        assert dataset.fingerprint in known.known()["data"][source.name]
        assert (len(dataset.train), len(dataset.test)) == (source.about.train, source.about.test)


def test_the_seal_is_no_proof(copied):
    """What the page says: a resealed folder is complete, for the seal has no key."""
    _, folder = copied
    resealed(folder, {"metrics.A_avg": 100.0})
    assert RunFolder(folder).complete_record() is not None
