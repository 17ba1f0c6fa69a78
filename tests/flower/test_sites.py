"""Samples that stay at their sites: the same bits as of one file with everything, and only counts before the turns."""

from __future__ import annotations

import csv
import json
import re

import numpy as np
import pytest

from fcl_bench.cli import predict
from fcl_bench.engine.remote.replies import deserialise
from fcl_bench.errors import UserError
from fcl_bench.execution.plan import make_plan
from tests.flower.fake_superlink import FakeSuperLink, reached
from tests.flower.test_over_nodes import features, model
from tests.small_runs import run_in, settings_for

GIVEN = ("clients=3", "tasks=2", "beta=1", "logger=none", "method=afl")
SITES = ("data=sites", "transport=flower", "transport.deadline=5")


@pytest.fixture
def link(tmp_path):
    return FakeSuperLink(tmp_path / "nodes")


def divided(tmp_path):
    """One data set as a file for each client and one for the server, as the run in one process deals it."""
    whole = ("data=features", features(tmp_path / "f.npz"))
    plan = make_plan(settings_for(tmp_path, *whole, *GIVEN))
    stream, dataset = plan.dealt.stream, plan.dealt.dataset
    for client in range(3):
        held = [clients[client] for clients in plan.dealt.shards]
        rows = np.concatenate(held)
        task = np.repeat(np.arange(2), [len(part) for part in held])
        # In no order of tasks, and with a sample that nobody labelled.
        order = np.argsort(rows)
        x, column = dataset.train.inputs[rows][order], stream.train_columns[rows][order]
        np.savez(tmp_path / f"site-{client}.npz", x=x, column=column, task=task[order])
    test = np.concatenate(stream.test)
    task = np.repeat(np.arange(2), [len(part) for part in stream.test])
    np.savez(tmp_path / "test.npz", x=dataset.test.inputs[test], column=stream.test_columns[test], task=task)
    return whole


def add_nodes(link, tmp_path, **changes):
    for client in range(3):
        link.add_node(client, changes={"data.path": str(tmp_path / f"site-{client}.npz"), **changes})


@pytest.mark.slow
def test_sites_give_what_one_file_with_everything_gives(tmp_path, monkeypatch, link):
    whole = divided(tmp_path)
    add_nodes(link, tmp_path)
    infos = []
    answer = link.workers["node-1"].answer

    def listening(request):
        answers = answer(request)
        if deserialise(request).kind == "info":
            infos.extend(deserialise(blob) for blob in answers)
        return answers

    link.workers["node-1"].answer = listening
    here = run_in(tmp_path / "here", *GIVEN, *whole)
    with reached(link, monkeypatch):
        given = (*GIVEN, *SITES, f"data.path={tmp_path / 'test.npz'}")
        there = run_in(tmp_path / "there", *given)
        again = run_in(tmp_path / "there", *given)
    ours, theirs = (_weights(outcome) for outcome in (there, here))
    assert np.array_equal(ours, theirs)
    assert there.record["metrics"] == here.record["metrics"]
    assert again.was_complete
    # Counts, versions and hashes: no array, and nothing for each class or sample.
    assert infos
    for info in infos:
        assert not len(info.message)
        assert len(json.dumps(info.beside)) < 1000
        assert np.shape(info.beside["samples"]) == (2, 1)
    with (there.folder / "tasks.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["train_samples"]) for row in rows] == [60, 60]


def _weights(outcome):
    from safetensors.numpy import load_file

    return load_file(outcome.folder / "model.safetensors")["W"]


@pytest.mark.slow
def test_other_data_at_a_site_is_another_run(tmp_path, monkeypatch, link):
    divided(tmp_path)
    add_nodes(link, tmp_path)
    given = (*GIVEN, *SITES, f"data.path={tmp_path / 'test.npz'}")
    with reached(link, monkeypatch):
        first = run_in(tmp_path / "there", *given)
        with np.load(tmp_path / "site-1.npz") as file:
            arrays = dict(file)
        arrays["x"][0, 0] += 1
        np.savez(tmp_path / "site-1.npz", **arrays)
        link.workers.clear()
        add_nodes(link, tmp_path)
        second = run_in(tmp_path / "there", *given)
    assert not second.was_complete
    assert second.record["data_fingerprint"] != first.record["data_fingerprint"]
    assert model(second) != model(first)


@pytest.mark.slow
def test_the_model_of_sites_predicts_the_server_s_test_samples_again(tmp_path, monkeypatch, link, capsys):
    divided(tmp_path)
    add_nodes(link, tmp_path)
    with reached(link, monkeypatch):
        run = run_in(tmp_path / "there", *GIVEN, *SITES, f"data.path={tmp_path / 'test.npz'}")
    assert predict.work([str(run.folder)]) == 0
    assert f"accuracy: {run.record['metrics']['A_T']:.2f} %" in capsys.readouterr().err
    with np.load(tmp_path / "test.npz") as file:
        arrays = dict(file)
    np.savez(tmp_path / "test.npz", **{**arrays, "x": arrays["x"] + 1})
    with pytest.raises(UserError, match="is not what run"):
        predict.work([str(run.folder)])


@pytest.mark.slow
def test_nobody_knows_what_is_right_of_guesses_at_sites(tmp_path, monkeypatch, link):
    divided(tmp_path)
    for client in range(3):
        with np.load(tmp_path / f"site-{client}.npz") as file:
            arrays = dict(file)
        labelled = np.arange(len(arrays["task"])) % 2 == 0
        arrays["column"] = np.where(labelled, arrays["column"], -1)
        np.savez(tmp_path / f"site-{client}.npz", **arrays, labelled=labelled)
    add_nodes(link, tmp_path)
    with reached(link, monkeypatch):
        method = ("method=fedran", "method.M=96", "method.rank=20", "method.complement=floor", "method.ssl=true")
        there = run_in(tmp_path / "there", *GIVEN, *SITES, *method, f"data.path={tmp_path / 'test.npz'}")
    with (there.folder / "uploads.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(int(row["accepted"]) for row in rows) > 0
    assert {row["right"] for row in rows if int(row["accepted"])} == {""}
    assert sum(int(row["labelled"]) for row in rows) < sum(int(row["samples"]) for row in rows)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda arrays: arrays.pop("task"), "lacks task"),
        (lambda arrays: arrays.update(x=arrays["x"][:, :3]), "has 3 features, the server's test samples 12"),
        (lambda arrays: arrays.update(x=arrays["x"] * np.nan), "holds NaN or infinity"),
        (lambda arrays: arrays.update(task=arrays["task"] + 1), "has the task 2|is no class of task"),
        (lambda arrays: arrays.update(column=arrays["column"] * 0 + 77), "column 77 is no class of task 0"),
        (lambda arrays: arrays.update(column=arrays["column"][1:]), "column has shape"),
    ],
)
def test_a_site_whose_file_does_not_fit_is_told_so(tmp_path, monkeypatch, link, caplog, harm, told):
    divided(tmp_path)
    with np.load(tmp_path / "site-2.npz") as file:
        arrays = dict(file)
    harm(arrays)
    np.savez(tmp_path / "site-2.npz", **arrays)
    add_nodes(link, tmp_path)
    with (
        reached(link, monkeypatch),
        pytest.raises(UserError, match="the node of client 2: error 20: its data") as error,
    ):
        run_in(tmp_path / "there", *GIVEN, *SITES, f"data.path={tmp_path / 'test.npz'}")
    # The server gets a number; the reason stays in the site's log.
    assert "\n" not in str(error.value)
    assert str(tmp_path) not in str(error.value)
    assert re.search(f"error 20: .*({told})", caplog.text)


def test_a_site_cannot_change_the_result(tmp_path, monkeypatch, link, caplog):
    divided(tmp_path)
    add_nodes(link, tmp_path, seed=3)
    with reached(link, monkeypatch), pytest.raises(UserError, match="error 20"):
        run_in(tmp_path / "there", *GIVEN, *SITES, f"data.path={tmp_path / 'test.npz'}")
    assert "a key of this node would change the result" in caplog.text


def test_sites_need_flower_and_files_that_fit(tmp_path):
    divided(tmp_path)
    with pytest.raises(UserError, match="data=sites stays at the clients' sites, and transport=in_process has none"):
        run_in(tmp_path / "a", *GIVEN, "data=sites", f"data.path={tmp_path / 'test.npz'}")
    with pytest.raises(UserError, match="tasks=3: the test samples are of the tasks 0, 1"):
        make_plan(settings_for(tmp_path, *GIVEN, *SITES, "tasks=3", f"data.path={tmp_path / 'test.npz'}"))
