"""`fcl-bench runs verify`: honest runs are right; whoever edits some of the files, sealed again or not, is found."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pytest

from fcl_bench.results.verifying import verify
from tests.execution.test_run_json import RUNS, TINY, TRAINED
from tests.results.forging import edit_arrays, edit_model, edit_table, resealed
from tests.small_runs import run_in

SMALL = ("method=fedran", "method.M=32", "method.rank=8", "tasks=2", "clients=2")
STSA = ("method=stsa", "method.M=32", "tasks=2", "clients=3")
#: Runs that write what other runs do not: matrices, tables, kinds of rows.
OTHERS = {
    "classes come back": (*STSA, "split=si_blurry", "label_rate=0.5"),
    "classes come back, predictions": (*STSA, "split=si_blurry", "predictions=true"),
    "validation beside the test": (*STSA, "data.validation=0.2"),
    "validation in its place": (*STSA, "data.validation=0.2", "data.test=false", "predictions=true"),
    "16 bits": ("method=fedran", "method.M=32", "method.rank=8", "tasks=3", "clients=3", "wire.dtype=bfloat16"),
    "clients fail": ("method=fedavg", *TINY, "faults=random", *(f"method.training.{knob}" for knob in TRAINED)),
    "masks": (*STSA, "method.M=16", "secure=sums"),
    "heads alone": ("method=fedavg", "method.trains=features", "tasks=2", "clients=3", "method.training.rounds=2"),
    "rounds and validation": (
        *("method=fedavg", *TINY, "data.validation=0.1", "evaluate_rounds=1"),
        *(f"method.training.{knob}" for knob in TRAINED),
    ),
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """A run without predictions: its answers are counts."""
    return run_in(tmp_path_factory.mktemp("counted"), *SMALL).folder


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    """A run with the answer to each sample."""
    return run_in(tmp_path_factory.mktemp("predicted"), *SMALL, "predictions=true").folder


@pytest.fixture
def run(request, tmp_path):
    """A copy of one of these two, to edit."""
    return shutil.copytree(request.getfixturevalue(getattr(request, "param", "counted")), tmp_path / "run")


def wrong(folder):
    """What contradicts something, each with the differences."""
    return {check.what: check.wrong for check in verify(folder).wrong}


def test_an_honest_run_is_right_and_says_what_it_cannot_tell(counted, predicted):
    for folder in (counted, predicted):
        found = verify(folder)
        assert wrong(folder) == {}
        told = {check.what for check in found.checks}
        assert {"run_id", "run.json", "metrics", "communication", "tasks.csv", "accuracy_matrix.csv"} <= told
        assert {"environment", "compute", "report", "gates", "runtime.total_seconds"} <= set(found.unchecked)
        assert not any(name.startswith(("metrics", "communication", "labels")) for name in found.unchecked)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*RUNS, *OTHERS])
def test_runs_of_every_kind_are_right(tmp_path, kind):
    assert wrong(run_in(tmp_path, *(RUNS | OTHERS)[kind]).folder) == {}


def in_json(**edits):
    return lambda folder: resealed(folder, {key.replace("__", "."): value for key, value in edits.items()})


def in_config(**edits):
    return lambda folder: resealed(folder, config={key.replace("__", "."): value for key, value in edits.items()})


def in_table(name, column, row, value, **edits):
    def edit(folder):
        edit_table(folder / name, column, row, value)
        in_json(**edits)(folder)

    return edit


def in_arrays(name, **arrays):
    def edit(folder):
        edit_arrays(folder / name, **arrays)
        resealed(folder)

    return edit


def in_model(**edits):
    def edit(folder):
        edit_model(folder / "model.safetensors", edits)
        resealed(folder)

    return edit


def other_data(folder):
    """The record of a run on other data: its id follows, but the model still has the old one."""
    from fcl_bench.execution.folder import run_id

    record, settings = json.loads((folder / "run.json").read_text()), verify(folder).settings
    named = {"data_fingerprint": "ab" * 16, "device": record["environment"]["device"], "features": record["features"]}
    in_json(data_fingerprint="ab" * 16, run_id=run_id({**settings.identity(), **named}))(folder)


def more_bytes(folder):
    """Fewer bytes in uploads.csv and in all of run.json that follows from them, but not in tasks.csv."""
    table = pd.read_csv(folder / "uploads.csv")
    table["up_bytes"] //= 2
    table.to_csv(folder / "uploads.csv", index=False)
    client, task = table.groupby("client")["up_bytes"].sum(), table.groupby(["task", "client"])["up_bytes"].sum()
    per_task = table.groupby(["task", "client"])["up_bytes"].sum().groupby("task").max()
    stage = {"up_max_bytes": int(task.max()), "up_max_bytes_by_task": per_task.tolist()}
    totals = {"up_total_bytes": int(table["up_bytes"].sum()), "up_max_bytes": int(task.max())}
    edits = {f"communication.{key}": value for key, value in totals.items()}
    edits |= {f"communication.by_stage.statistics.{key}": value for key, value in {**stage, **totals}.items()}
    resealed(folder, {**edits, "communication.up_total_max_bytes": int(client.max())})


def all_right(folder):
    """A matrix of 100 % and the metrics of that, but not the counts."""
    pd.DataFrame({"task_0": [100.0, 100.0], "task_1": [None, 100.0]}).to_csv(
        folder / "accuracy_matrix.csv", index=False
    )
    perfect = {"A_avg": 100.0, "A_T": 100.0, "A_avg_tasks": 100.0, "A_T_tasks": 100.0, "retention": 100.0}
    perfect |= {"accuracy": [100.0, 100.0], "forgetting": 0.0, "forgetting_fedprotip": 0.0, "stability": 100.0}
    perfect |= {"plasticity": 100.0, "stability_by_task": [None, 100.0], "plasticity_by_task": [100.0, 100.0]}
    resealed(folder, {"metrics": {**perfect, "retention_by_task": [100.0, 100.0]}})


#: What somebody edits -> how, and what is found wrong.
EDITS = {
    "a metric": (in_json(metrics__A_avg=100.0), {"metrics"}),
    "a metric that is not defined": (in_json(metrics__forgetting=None), {"metrics"}),
    "an accuracy of the series": (in_json(metrics__accuracy=[100.0, 100.0]), {"metrics"}),
    "a shorter series": (in_json(metrics__accuracy=[90.0]), {"metrics"}),
    "the task given": (in_json(task_aware__A_T=100.0), {"task_aware"}),
    "bytes": (in_json(communication__up_max_bytes=1), {"communication"}),
    "bytes of raw samples": (in_json(communication__raw__total_bytes=10**9), {"communication"}),
    "a paper's count": (in_json(communication__accounting__fedran_mib=0.1), {"communication"}),
    "the wire's type": (in_json(communication__wire__dtype="float64"), {"communication"}),
    "seconds": (in_json(runtime__seconds_per_task=0.0), {"runtime"}),
    "labels": (in_json(labels__rate=0.1), {"labels"}),
    "dropped uploads": (in_json(dropped={"uploads": 1, "clients": [0]}), {"dropped"}),
    "single samples": (in_json(privacy__one_sample_sums=99), {"privacy"}),
    "clients' accuracy": (in_json(client_accuracy__least=99.0), {"client_accuracy"}),
    "bounds that nobody measured": (in_json(bounds=[{"gram_error": 0.0}]), {"bounds"}),
    "training samples": (in_json(class_samples=[1] * 10), {"class_samples"}),
    "validation": (
        in_json(validation={"share": 0.1, "samples": 1, "replaces_test": True, "metrics": None}),
        {"validation"},
    ),
    "a first stage": (in_json(adaptation={"up_max_bytes": 1}), {"adaptation"}),
    "the best round": (in_json(rounds={"every": 1, "best": [99.0], "best_round": [0]}), {"rounds"}),
    "tasks named": (in_json(routing={"accuracy": [99.0]}), {"the folder"}),
    "the seed": (in_json(seed=1), {"run.json", "model.safetensors"}),
    "the method": (in_json(method="stsa"), {"run.json", "model.safetensors"}),
    "the revision": (in_json(method_revision=1), {"run.json"}),
    "the profile": (in_json(profile="quick"), {"run.json"}),
    "the id": (in_json(run_id="0123456789ab"), {"run_id", "model.safetensors"}),
    "the data": (in_json(data_fingerprint="ab" * 16), {"run_id"}),
    "the data and the id": (other_data, {"model.safetensors"}),
    "the device": (in_json(environment__device="NVIDIA H100"), {"run_id"}),
    "the features": (in_json(features__size="32"), {"run_id", "model.safetensors"}),
    "a knob": (in_config(method__rank=4), {"run_id", "model.safetensors", "communication"}),
    "the split": (in_config(split__order_seed=3), {"run_id"}),
    "the backbone's knob": (in_config(backbone__size=16), {"run_id"}),
    "the label rate": (in_config(label_rate=0.5), {"run_id", "labels"}),
    "the number of clients": (in_config(clients=3), {"run_id", "run.json", "runtime", "tasks.csv"}),
    "an accuracy by task": (in_table("tasks.csv", "accuracy", 1, 99.0), {"tasks.csv"}),
    "samples": (in_table("tasks.csv", "train_samples", 0, 7), {"tasks.csv"}),
    "test samples": (in_table("tasks.csv", "test_samples", 0, 7), {"tasks.csv"}),
    "seconds of the server": (in_table("tasks.csv", "server_seconds", 0, 0.0), {"runtime", "tasks.csv"}),
    "one upload": (in_table("uploads.csv", "up_bytes", 3, 1), {"communication", "tasks.csv"}),
    "a client": (in_table("uploads.csv", "client", 3, 0), {"communication"}),
    "uploads and the record": (more_bytes, {"tasks.csv"}),
    "the matrix": (in_table("accuracy_matrix.csv", "task_0", 1, 99.0), {"accuracy_matrix.csv"}),
    "the matrix and the metrics": (all_right, {"accuracy_matrix.csv", "metrics"}),
    "no whole samples": (
        in_table("task_aware_matrix.csv", "task_0", 1, 99.9),
        {"task_aware_matrix.csv", "task_aware"},
    ),
    "a class": (in_table("class_accuracy.csv", "class_1", 1, 100.0), {"class_accuracy.csv"}),
    "the test samples": (in_arrays("partition.npz", test_t0=lambda own: own[:-5]), {"tasks.csv", "metrics"}),
    "a client's samples": (in_arrays("partition.npz", train_t0_c0=lambda own: own[:9]), {"class_samples"}),
    "the order of classes": (in_arrays("partition.npz", class_order=lambda own: own[::-1]), {"model.safetensors"}),
    "the model": (in_model(seed=3), {"model.safetensors"}),
    "the model's method": (in_model(**{"settings.method.rank": 2}), {"model.safetensors"}),
}


@pytest.mark.parametrize(("edit", "found"), EDITS.values(), ids=EDITS)
def test_an_edit_that_is_sealed_again_is_found(run, edit, found):
    edit(run)
    told = wrong(run)
    assert told, "nothing is wrong"
    assert found <= set(told)


@pytest.mark.parametrize("run", ["predicted"], indirect=True)
@pytest.mark.parametrize("record", [False, True])
def test_changed_predictions_are_found_and_their_own_accuracy_is_told(run, record):
    """The oracle counts the right answers after the last task itself."""
    table = pd.read_parquet(run / "predictions.parquet")
    table.loc[table["after"] == 0, "prediction"] = table["label"]
    table.to_parquet(run / "predictions.parquet")
    last = table[table["after"] == 1]
    accuracy = 100 * np.mean(last["label"].to_numpy() == last["prediction"].to_numpy())
    resealed(run, {"metrics.accuracy": [100.0, accuracy], "metrics.A_avg": (100 + accuracy) / 2} if record else {})
    told = wrong(run)
    assert {"confusion.npz", "right answers in confusion.npz", "accuracy_matrix.csv", "tasks.csv"} <= set(told)
    series = [line for line in told["metrics"] if line.startswith(("metrics.accuracy", "metrics.A_avg "))]
    assert bool(series) == (not record)


@pytest.mark.parametrize("run", ["predicted"], indirect=True)
@pytest.mark.parametrize(
    ("column", "what"), [("sample", "predictions.parquet"), ("label", "labels in predictions.parquet")]
)
def test_answers_to_other_samples_are_found(run, column, what):
    table = pd.read_parquet(run / "predictions.parquet")
    last = table.index[table["after"] == 1]
    table.loc[last, column] = np.roll(table.loc[last, column], 1) if column == "label" else table.loc[last[0], column]
    table.to_parquet(run / "predictions.parquet")
    resealed(run)
    assert what in wrong(run)


@pytest.mark.parametrize("run", ["predicted"], indirect=True)
def test_the_recomputed_number_is_that_of_the_answers(run):
    """The oracle: an accuracy from predictions.parquet, in plain NumPy."""
    table = pd.read_parquet(run / "predictions.parquet")
    series = [100 * np.mean(own["label"] == own["prediction"]) for _, own in table.groupby("after")]
    resealed(run, {"metrics.A_avg": 99.0})
    [line] = wrong(run)["metrics"]
    assert line.startswith("metrics.A_avg is 99.0, recomputed ")
    assert float(line.rpartition(" ")[2]) == pytest.approx(np.mean(series))


@pytest.mark.parametrize("name", ["config.yaml", "uploads.csv", "confusion.npz", "accuracy_matrix.csv"])
def test_a_file_that_was_changed_alone_does_not_match_its_checksum(run, name):
    with (run / name).open("ab") as file:
        file.write(b"\n")
    assert wrong(run) == {"checksums": [f"the folder is damaged: {name} does not match its checksum"]}


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: (run / "confusion.npz").write_bytes(b"PK"),
        lambda run: (run / "uploads.csv").write_text("task,round\n0,0\n"),
        lambda run: edit_table(run / "uploads.csv", "client", 0, 10**6),
        lambda run: edit_table(run / "uploads.csv", "stage", 0, ""),
        lambda run: (run / "config.yaml").write_text("method: 3\n"),
        lambda run: (run / "model.safetensors").write_bytes(b"\0" * 20),
        lambda run: edit_arrays(run / "confusion.npz", label=lambda own: own + 90),
    ],
)
def test_files_of_no_run_are_told_and_no_crash(run, damage):
    damage(run)
    resealed(run)
    assert wrong(run)


def test_what_nothing_else_in_the_folder_tells_is_not_found(run):
    """What the page says: the commit, for one, is the record's own word."""
    resealed(run, {"environment.git_commit": "1" * 40})
    assert wrong(run) == {}
    assert "environment" in verify(run).unchecked
