"""A track is carried out once: what is there is not run again, and files stay equal to the byte."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from fcl_bench.cli import tune
from fcl_bench.errors import UserError
from fcl_bench.leaderboard import running
from fcl_bench.leaderboard.running import Running
from fcl_bench.leaderboard.store import Store
from tests.leaderboard.rows import row, track

TRACK = """# @package _global_
# The digits in two tasks
defaults:
  - override /data: digits

track: small-1
tasks: 2
grid:
  full: {clients: "2,3", seed: "0,1"}
budget:
  training: {method.trains: features, method.training.rounds: 1, method.training.epochs: 1}
"""


class InProcess:
    """A pool whose work is done at once, in this process."""

    def __init__(self, *_, **__):
        pass

    def submit(self, function, *arguments):
        future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_):
        pass


def settings_with(ridge=None):
    """A `settings_of` that knows a method, a ridge whose default is given, and `rate`, which no track has."""

    def settings_of(overrides):
        kept = {key: value for key, _, value in (text.partition("=") for text in overrides)}
        method = {"name": kept["method"].removesuffix("_again"), "ridge": kept.get("method.ridge", ridge)}
        rate = {"rate": kept["rate"]} if "rate" in kept else {}
        return SimpleNamespace(identity=lambda: {"method": method, "beta": kept["beta"], **rate})

    return settings_of


@pytest.fixture
def done(monkeypatch):
    """The runs and searches that are done, which say at once what a row says: method, kind, beta, seed."""
    found = []

    def do(job, out):
        found.append((job.method, job.kind, job.setting["beta"], job.seed))
        if job.method == "refused":
            raise UserError("method=refused needs images", "backbone=tiny")
        if job.method == "broken" and job.seed == 1:
            raise ZeroDivisionError("a bug")
        made = row(job.method, 50.0, job.seed, job.kind, job.setting["beta"], request=job.request)
        return {**made, "right": None, "data": "of-the-track"}

    def search(job, out, trials):
        found.append((job.method, "search", trials))
        return {} if job.method == "knobless" else {"method.ridge": "0.5"}

    for name, fake in (("do", do), ("search", search), ("settings_of", settings_with())):
        monkeypatch.setattr(running, name, fake)
    monkeypatch.setattr(running, "fingerprint_of", lambda _: "of-the-track")
    monkeypatch.setattr(running, "ProcessPoolExecutor", InProcess)
    monkeypatch.setattr(running, "share_cores", lambda *_: None)
    monkeypatch.setattr("fcl_bench.leaderboard.store.title_of", str)
    monkeypatch.setattr("fcl_bench.leaderboard.store.family_of", lambda _: "other")
    return found


def carried_out(folder, *methods, trials=0, typed=(), retried=()):
    """What ran, and the rows' store as it was saved."""
    one = track()
    one.typed.extend(typed)
    store = Store(folder, one.name)
    store.describe(one, methods)
    work = Running(one, store, folder / "mine", trials, 1)
    work.carry_out(methods, retried)
    return work, Store(folder, one.name)


def files(folder):
    return {file.name: file.read_bytes() for file in folder.glob("*.*")}


def test_the_same_twice_runs_nothing_the_second_time(done, tmp_path, capsys):
    carried_out(tmp_path, "afl", "knobless", trials=5)
    assert len(done) == len(set(done)) == 3 * 2 * 3 + 2  # two methods and one tuned, two settings, three seeds
    assert {entry[0] for entry in done if entry[1] == "tuned"} == {"afl"}
    assert "what is left takes about" in capsys.readouterr().out
    before = files(tmp_path)
    done.clear()
    carried_out(tmp_path, "afl", "knobless", trials=5)
    assert done == []
    assert files(tmp_path) == before


def test_a_method_more_is_run_alone(done, tmp_path):
    carried_out(tmp_path, "afl")
    done.clear()
    _, store = carried_out(tmp_path, "stsa")
    assert {entry[0] for entry in done} == {"stsa"}
    assert {one["method"] for one in store.rows} == {"afl", "stsa"}


def test_more_trials_search_again_and_run_what_they_choose(done, tmp_path):
    carried_out(tmp_path, "afl", trials=5)
    done.clear()
    carried_out(tmp_path, "afl", trials=9)
    assert done == [("afl", "search", 9)]  # its choice is the same, and the runs are there


def test_two_names_of_one_run_have_one_row(done, tmp_path):
    _, store = carried_out(tmp_path, "afl", "afl_again")
    assert {one["method"] for one in store.rows} == {"afl"}
    assert store.about["not_run"] == {"afl_again": "its run is that of afl"}


def test_a_refused_method_says_why_and_is_asked_again_only_by_name(done, tmp_path):
    work, store = carried_out(tmp_path, "refused", "afl")
    assert (list(work.refused), work.failed) == (["refused"], {})
    assert store.about["not_run"]["refused"] == "method=refused needs images (backbone=tiny)"
    done.clear()
    carried_out(tmp_path, "refused", "afl")
    assert done == []
    carried_out(tmp_path, "refused", "afl", retried=["refused"])
    assert {entry[0] for entry in done} == {"refused"}


def test_where_every_method_is_refused_nothing_is_written(done, tmp_path):
    with pytest.raises(UserError, match="the track mine refuses every method, refused since method=refused needs"):
        carried_out(tmp_path, "refused")
    assert files(tmp_path) == {}


def test_a_bug_in_one_method_costs_the_others_nothing(done, tmp_path):
    work, store = carried_out(tmp_path, "broken", "afl")
    assert work.failed == {"broken": "ZeroDivisionError: a bug"}
    assert sum(one["method"] == "afl" for one in store.rows) == 6


def test_a_key_that_changes_the_track_is_refused_once_rows_are_there(done, tmp_path):
    carried_out(tmp_path, "afl")
    with pytest.raises(UserError, match="rate=0.5, and the rows that are there have rate=None"):
        carried_out(tmp_path, "stsa", typed=["rate=0.5"])


def test_rows_of_an_older_default_are_never_averaged_with_new_ones(done, tmp_path, monkeypatch):
    carried_out(tmp_path, "afl")
    monkeypatch.setattr(running, "settings_of", settings_with(ridge="7"))
    _, store = carried_out(tmp_path, "afl")
    assert len(store.rows) == 6
    assert len({one["request"] for one in store.rows}) == 1


def test_data_that_cannot_be_read_or_are_others_are_no_methods_fault(done, tmp_path, monkeypatch):
    carried_out(tmp_path, "afl")
    before = files(tmp_path)

    def missing(_):
        raise UserError("data.path=typo.npz does not exist", "a file")

    for fake, told in ((missing, "typo.npz does not exist"), (lambda _: "others", "are not those of the rows")):
        monkeypatch.setattr(running, "fingerprint_of", fake)
        with pytest.raises(UserError, match=told):
            carried_out(tmp_path, "afl", "stsa")
        about = Store(tmp_path, "mine").about
        assert about["not_run"] == {}
    assert files(tmp_path)["mine.csv"] == before["mine.csv"]


@pytest.fixture
def board(tmp_path, monkeypatch, command):
    """`fcl-bench leaderboard run small`, with further arguments -> (exit code, stdout, stderr)."""
    (tmp_path / "own" / "track").mkdir(parents=True)
    (tmp_path / "own" / "track" / "small.yaml").write_text(TRACK)
    monkeypatch.chdir(tmp_path)
    return lambda *typed: command("--config-dir", "own", "leaderboard", "run", "small", "--out", "b", *typed)


@pytest.mark.slow
def test_the_command_with_worker_processes(board, tmp_path):
    typed = ("--methods", "fedncm,afl,fedavg", "--trials", "1", "--workers", "2")
    code, printed, told = board(*typed)
    assert (code, told) == (0, "")
    rows = Store(tmp_path / "b", "small").rows
    assert len(rows) == 3 * 4 + 2 * 4  # fedncm has no knobs
    assert {one["rounds"] for one in rows if one["method"] == "fedavg"} == {2}
    before = {file.name: file.read_bytes() for file in (tmp_path / "b").glob("small.*")}
    assert set(before) == {"small.csv", "small.yaml", "small.html"}
    shutil.rmtree(tmp_path / "b" / "small")  # the rows are enough
    assert board(*typed)[0] == 0
    assert {file.name: file.read_bytes() for file in (tmp_path / "b").glob("small.*")} == before
    assert not (tmp_path / "b" / "small" / "runs").exists()
    code, printed, _ = board("--methods", "fedlda,dualprompt", "--trials", "0")
    assert code == 2
    assert "dualprompt (defaults) is not run: " in printed
    assert "FedLDA" in printed


@pytest.mark.slow
def test_a_spoiled_test_set_changes_no_choice(tmp_path):
    """The search reads no test sample: with other test samples it chooses the same."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(400, 8)) + np.repeat(np.eye(4, 8), 100, axis=0), np.repeat(np.arange(4), 100)
    chosen = []
    for name, spoiled in (("good", x[::4]), ("spoiled", -50 * x[::4][::-1])):
        file = tmp_path / f"{name}.npz"
        np.savez(file, x_train=x, y_train=y, x_test=spoiled, y_test=y[::4])
        typed = ["method=afl", "data=features", f"data.path={file}", "tasks=2", "clients=2"]
        job = running.Job("afl", "tuned", "same", {}, 0, typed)
        chosen.append(running.search(job, tmp_path / name, 4))
    assert chosen[0] == chosen[1]
    assert "method.ridge" in chosen[0]


def test_other_rules_search_again_beside_an_older_study(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    job = running.Job("afl", "tuned", "same", {}, 0, ["method=afl", "data=digits", "tasks=2", "clients=2"])
    for rules in (running.RULES, running.RULES + 1):
        for module in (running, tune):
            monkeypatch.setattr(module, "RULES", rules)
        assert "method.ridge" in running.search(job, tmp_path, 1)
    assert len(list((tmp_path / "studies").glob("*.journal"))) == 2
