"""Ways to fool a cell beside a printed number: none of them fills it as if the run had the printed setting."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch

from fcl_bench import environment
from fcl_bench.execution.folder import run_id
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.papers import matching
from fcl_bench.papers.matching import EDITED, UNKNOWN_CODE, UNKNOWN_DATA, UNKNOWN_WEIGHTS, Matcher
from fcl_bench.results.collect import collect
from fcl_bench.results.summarise import used_runs
from fcl_bench.results.verifying import verify
from tests.conftest import shared
from tests.data.hub_copies import cifar100, labelled, write_rows
from tests.results.forging import edit_arrays, edit_model, edit_table, resealed
from tests.results.test_paper_tables import DIFFERENCE, NOT_RUN, NOTHING, OURS, by_heading, cell, table_of
from tests.small_runs import interrupted_in, run_in

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
    tests = pd.read_csv(folder / "tasks.csv")["test_samples"]
    edit_table(folder / "tasks.csv", "test_samples", 0, tests[0] + samples)
    resealed(folder, edits)
    table = shown(runs)
    assert by_heading(table)["our runs"] == NOT_RUN
    assert differs in table.runs.loc[0, "differs"]


def test_a_subset_with_the_right_counts_but_other_images_is_unknown_data(honest, monkeypatch):
    """Digits whose fingerprint is not on the list stand for any other images of the same number."""
    monkeypatch.setattr(
        matching, "known", lambda: {"data": {"cifar100": ["cb0cdddf9df2a717ebbd1822a9b4ccfa"]}, "weights": {}}
    )
    row = by_heading(shown(honest))
    assert row[f"{OURS} (n)"].endswith(f"[{UNKNOWN_DATA}]")
    assert row[DIFFERENCE] == NOTHING


@pytest.mark.parametrize("typed", ["data.train_split=test", "data.test_split=train"])
def test_the_other_side_of_the_data_is_another_setting(honest, tmp_path, typed):
    wanted = pd.Series(cell(data="cifar100", backbone="tiny"))
    (tmp_path / "x").mkdir()
    config = matching.settings_of((*matching.overrides(wanted), typed)).resolved
    (tmp_path / "x" / "config.yaml").write_text(json.dumps(config))
    run = used_runs(collect(honest)).assign(data="cifar100", folder="x")
    key, value = typed.split("=")
    default = "train" if "train_" in key else "test"
    matcher = Matcher(run, tmp_path)
    assert list(matcher.differences(wanted).values()) == [[f"{key}={default}, here {value}"]]


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
def test_weights_that_are_not_drawn_whole_must_be_on_the_list(backbone, record, knows):
    found = matching.weights_of(
        {"checkpoint": None} | record, matching.settings_of(("data=cifar100", *backbone)).backbone
    )
    assert (found in (None, "known")) == knows


@pytest.mark.slow
def test_the_list_has_what_is_loaded_here():
    for typed in (("data=digits",), ("data=cifar100", f"data.path={shared('data/cifar100')}")):
        source = matching.settings_of(("method=afl", *typed)).data
        dataset = source.load()
        assert dataset.fingerprint in matching.known()["data"][source.name]
        assert (len(dataset.train), len(dataset.test)) == (source.about.train, source.about.test)
    features = matching.settings_of(
        ("data=features", f"data.path={shared('data/cifar100-mobilenetv2.npz')}")
    ).data.load()
    assert matching.known_as("data", features.fingerprint) == "features"
    file = shared("weights/mobilenetv2_100/model.safetensors")
    backbone = matching.settings_of(("backbone=mobilenetv2", f"backbone.checkpoint={file}")).backbone
    weights = backbone.open(matching.settings_of(("data=digits",)).data.load(), torch.device("cpu")).identity["weights"]
    assert matching.known_as("weights", weights) == backbone.name


def identified(folder, record=None, config=None, model=None):
    """Edit a run and give it the id that follows, in run.json and, with `model`, in what the model says of itself."""
    resealed(folder, record, config)
    written, settings = json.loads((folder / "run.json").read_text()), verify(folder).settings
    about = {key: written[key] for key in ("data_fingerprint", "features")}
    name = run_id({**settings.identity(), **about, "device": written["environment"]["device"]})
    if model is not None:
        edit_model(folder / "model.safetensors", {**model, "run_id": name})
    resealed(folder, {"run_id": name})


def better(folder):
    """All answers right in the matrix, and one number that says so."""
    edit_table(folder / "accuracy_matrix.csv", "task_0", 0, 100.0)
    resealed(folder, {"metrics.A_avg": 100.0})


def fewer_tests(folder):
    """A subset whose missing test samples are called unseen, so that there are as many as the whole set has."""
    edit_arrays(folder / "partition.npz", test_t0=lambda own: own[5:])
    tests = pd.read_csv(folder / "tasks.csv")["test_samples"]
    edit_table(folder / "tasks.csv", "test_samples", 0, tests[0] - 5)
    resealed(folder, {"unseen_test_samples": 5})


def other_answers(folder):
    edit_arrays(folder / "confusion.npz", answer=lambda own: np.zeros_like(own))
    resealed(folder)


@pytest.mark.slow_cases(
    "a seed with its id", "another device with its id", "another network with its id", "known data with their id"
)
@pytest.mark.parametrize(
    "edit",
    {
        "a metric": lambda folder: resealed(folder, {"metrics.A_avg": 100.0}),
        "metrics and their matrix": better,
        "an accuracy of tasks.csv": lambda folder: [
            edit_table(folder / "tasks.csv", "accuracy", 0, 1),
            resealed(folder),
        ],
        "bytes": lambda folder: resealed(folder, {"communication.up_max_bytes": 1}),
        "answers": other_answers,
        "a miniature called whole": lambda folder: resealed(folder, config={"profile": "quick"}),
        "a seed with its id": lambda folder: identified(folder, {"seed": 1}, {"seed": 1}),
        "known data with their id": lambda folder: identified(
            folder, {"data_origin": "other"}, model={"data": "other"}
        ),
        "another network with its id": lambda folder: identified(folder, {"features": {"backbone": "pixels"}}),
        "another device with its id": lambda folder: identified(folder, {"environment.device": "NVIDIA H100"}),
        "a subset called whole": fewer_tests,
        "another order of classes": lambda folder: [
            edit_arrays(folder / "partition.npz", class_order=lambda own: own[::-1]),
            resealed(folder),
        ],
    }.items(),
    ids=lambda case: case[0],
)
def test_a_record_that_its_own_files_contradict_is_marked(copied, edit):
    runs, folder = copied
    edit[1](folder)
    row = by_heading(shown(runs))
    [ours] = [own for heading, own in row.items() if heading.startswith("ours, ")]
    [difference] = [own for heading, own in row.items() if heading.startswith("difference")]
    assert (ours.endswith(f"[{EDITED}]"), difference) == (True, NOTHING)


def test_another_device_has_a_column_of_its_own(copied):
    """Whoever edits all that tells of the device is not found; but numbers of two devices are never averaged."""
    runs, folder = copied
    other = shutil.copytree(folder, runs / "other")
    identified(other, {"environment.device": "NVIDIA H100"}, model={})
    table = shown(runs)
    counts = {head: table.values[head].tolist() for head in table.values if head.endswith(" n")}
    assert counts == {f"{OURS} n": [1], f"{OURS.replace('cpu', 'NVIDIA H100')} n": [1]}


def test_an_earlier_revision_is_another_setting_whatever_its_record_says(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(FedRAN, "revision", FedRAN.revision - 1)
        folder = run_in(tmp_path, *SMALL).folder
    assert by_heading(shown(tmp_path / "runs"))["our runs"] == NOT_RUN
    resealed(folder, {"method_revision": FedRAN.revision})
    assert by_heading(shown(tmp_path / "runs"))[f"{OURS} (n)"].endswith(f"[{EDITED}]")


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_under_the_name_of_another_seed_is_no_second_one(copied, link):
    runs, folder = copied
    other = runs / "fedran-digits-pixels-0123456789ab"
    if link:
        other.symlink_to(folder)
    else:
        shutil.copytree(folder, other)
    assert shown(runs).values[f"{OURS} n"].tolist() == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed",
    [
        ("data.validation=0.1",),
        ("data.validation=0.2", "data.test=false"),
        ("label_rate=0.5",),
        ("split.order_seed=7",),
        ("split=si_blurry",),
        ("partition=iid",),
        ("wire.dtype=float16",),
        ("dtype=float32",),
        ("faults=random",),
        ("backbone.size=4",),
    ],
    ids=" ".join,
)
def test_a_run_with_one_more_key_is_another_setting(tmp_path, typed):
    run_in(tmp_path, *SMALL, *typed)
    assert by_heading(shown(tmp_path / "runs"))["our runs"] == NOT_RUN


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"data.validation": 0.0, "data.test": True}, {"label_rate": 1.0}])
def test_a_run_whose_key_was_taken_out_afterwards_is_marked(tmp_path, config):
    typed = ["label_rate=0.5"] if "label_rate" in config else ["data.validation=0.2", "data.test=false"]
    folder = run_in(tmp_path, *SMALL, *typed).folder
    identified(folder, {"validation": None}, config, model={})
    row = by_heading(shown(tmp_path / "runs"))
    assert row.get("our runs") == NOT_RUN or row[f"{OURS} (n)"].endswith(f"[{EDITED}]")


def test_a_run_that_was_resumed_under_other_code_is_of_unknown_code(tmp_path, monkeypatch):
    begun, ended = "a" * 40, "b" * 40
    monkeypatch.setattr(environment, "git_commit", lambda: begun)
    with interrupted_in(1, monkeypatch):
        run_in(tmp_path, *SMALL)
    monkeypatch.setattr(environment, "git_commit", lambda: ended)
    record = run_in(tmp_path, *SMALL).record
    assert record["environment"]["git_commit"] == f"{begun}, {ended}"
    assert by_heading(shown(tmp_path / "runs"))[f"{OURS} (n)"].endswith(f"[{UNKNOWN_CODE}]")


@pytest.mark.slow
def test_random_weights_in_a_pretrained_network_are_unknown_weights(tmp_path, command):
    """End to end: a checkpoint in the form of ResNet-18 whose numbers nobody trained, on the whole of known data."""
    import timm
    from safetensors.torch import save_file

    save_file(timm.create_model("resnet18", num_classes=0).state_dict(), tmp_path / "random.safetensors")
    setting = ("method.M=32", "method.rank=8", "backbone.transform.size=32")
    made = ("backbone=resnet18", f"backbone.checkpoint={tmp_path / 'random.safetensors'}", f"out={tmp_path}")
    code, _, _ = command("data=digits", *SMALL, *setting, *made)
    assert code == 0
    row = by_heading(shown(tmp_path / "runs", cell(backbone="resnet18", setting=" ".join(setting))))
    assert row[f"{OURS} (n)"].endswith(f"[{UNKNOWN_WEIGHTS}]")
    code, printed, _ = command("runs", "verify", *map(str, tmp_path.glob("runs/fedran*")))
    assert code == 0
    assert [line for line in printed.splitlines() if line.startswith("  weights ") and line.endswith(": unknown")]


@pytest.mark.slow
@pytest.mark.parametrize("typed", [(), ("data.train_split=test",)])
def test_a_small_data_set_in_the_place_of_a_known_one_is_another_setting(tmp_path, command, typed):
    """End to end: four images in the layout of CIFAR-100."""
    cifar100(tmp_path)
    [path] = tmp_path.glob("uoft-cs/*/*")
    made = ("data=cifar100", f"data.path={path}", "backbone=pixels", f"out={tmp_path}", "partition.min_size=0", *typed)
    code, _, told = command(*SMALL, *made)
    assert code == 0, told
    setting = "method.M=32 method.rank=8 partition.min_size=0"
    table = shown(tmp_path / "runs", cell(data="cifar100", backbone="pixels", setting=setting))
    assert by_heading(table)["our runs"] == NOT_RUN
    why = "data.train_split=train, here test" if typed else "train samples 50000, here 4; test samples 10000, here 2"
    assert why in table.runs.loc[0, "differs"]


@pytest.mark.slow
def test_other_images_in_the_right_number_are_unknown_data(tmp_path, command):
    """End to end: 60,000 images of 3 x 2 pixels in the layout of CIFAR-100."""
    import datasets

    types = {"fine_label": datasets.Value("int64"), "coarse_label": datasets.Value("int64")}
    for split, count in (("train", 50_000), ("test", 10_000)):
        hundred = labelled(list(range(100)), "img", "fine_label")
        rows = [{**row, "coarse_label": 0} for row in hundred] * (count // 100)
        write_rows(tmp_path / "data" / f"{split}-00000-of-00001.parquet", rows, types, "img")
    made = ("data=cifar100", f"data.path={tmp_path / 'data'}", "backbone=pixels", f"out={tmp_path}")
    code, _, told = command(*SMALL, *made)
    assert code == 0, told
    row = by_heading(shown(tmp_path / "runs", cell(data="cifar100", backbone="pixels")))
    assert row[f"{OURS} (n)"].endswith(f"[{UNKNOWN_DATA}]")
    assert row[DIFFERENCE] == NOTHING
