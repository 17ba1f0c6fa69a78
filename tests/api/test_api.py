"""The API makes and finds the command's runs, with the command's errors, and leaves everything else alone."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pandas as pd
import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

import fcl_bench
from fcl_bench.composition import config_dir
from tests.small_runs import run_in

SMALL = {"data": "digits", "tasks": 2, "clients": 2, "overrides": {"method.M": 64}}
TYPED = ("data=digits", "tasks=2", "clients=2", "method.M=64")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def made(out) -> fcl_bench.Run:
    return fcl_bench.run("stsa", out=out, **SMALL)


def test_the_command_finds_the_run_complete(made, out, command):
    code, printed, _ = command("method=stsa", *TYPED, f"out={out}")
    assert code == 0
    assert "this run is complete already" in printed
    assert str(made.path) in printed


def test_the_commands_run_is_found_complete(tmp_path):
    theirs = run_in(tmp_path, "method=afl", *TYPED, "beta=0.5", "backbone=pixels")
    assert not theirs.was_complete
    written = (theirs.folder / "run.json").stat().st_mtime_ns
    ours = fcl_bench.run("afl", beta=0.5, out=str(tmp_path), backbone="pixels", **SMALL)
    assert ours.path == theirs.folder
    assert ours.record == theirs.record
    assert (ours.path / "run.json").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    "same",
    [
        {"overrides": ["method.M=64"]},
        {"method.M": 64},
        {"method.M": np.int64(64)},
        {"method.M": "64"},
        {"overrides": {"method.M": 64, "wire.dtype": "float32"}},
        {"overrides": ["method.M=32", "method.M=64"]},
        {"method.M": 32, "overrides": {"method.M": 64}, "beta": 0.1, "force": False, "label_rate": 1},
    ],
)
def test_every_way_of_writing_a_key_gives_the_same_run(same, made, out):
    assert fcl_bench.run("stsa", data="digits", tasks=2, clients=2, out=out, **same).id == made.id


@pytest.mark.parametrize(
    ("keys", "typed"),
    [
        ({"bta": 1}, ["bta=1"]),
        ({"beta": -1}, ["beta=-1"]),
        ({"beta": "x"}, ["beta=x"]),
        ({"method": "sts"}, ["method=sts"]),
        ({"data": "nope"}, ["data=nope"]),
        ({"data": "features"}, ["data=features"]),
        ({"data": "features", "data.path": "a file.npz"}, ["data=features", "data.path=a file.npz"]),
        ({"method": "stsa", "method.rank": 3}, ["method=stsa", "method.rank=3"]),
        ({"seed": [1]}, ["seed=[1]"]),
        ({"seed": None}, ["seed=null"]),
        ({"overrides": ["seed"]}, ["seed"]),
        ({"overrides": ["seed=("]}, ["seed=("]),
        ({"method": {"M": 3}}, ["method={M:3}"]),
        ({"clients": 10**30}, [f"clients={10**30}"]),
    ],
)
def test_errors_are_the_commands(keys, typed, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fcl_bench.UserError) as raised:
        fcl_bench.run(**keys)
    assert capsys.readouterr() == ("", "")
    code, _, told = command(*typed)
    assert code == 2
    said = told.splitlines()[-1].removeprefix("fcl-bench: error: ")
    # Numbers as Python writes them.
    assert str(raised.value) == said or str(raised.value).replace("-1.0", "-1") == said.replace("-1.0", "-1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"overrides": "seed=1"}, "is a text (a list: overrides="),
        ({"overrides": ["-m"]}, "-m is an option of the command"),
        ({"overrides": ["seed=0,1"]}, "seed=0,1 names several values (-m runs each of them, in Python fcl_bench.sweep"),
        ({"overrides": ["hydra/launcher=parallel"]}, "is for the command"),
        ({"preview": True}, "preview=true prints and draws a split"),
        ({"transport": "ranks"}, "transport=ranks from Python: every rank would be a server of its own"),
        ({"seed": object()}, "is a object (a number, a text"),
    ],
)
def test_what_only_the_command_does_is_told(keys, told):
    with pytest.raises(fcl_bench.UserError) as raised:
        fcl_bench.run(**keys)
    assert told in str(raised.value)


def test_hydra_is_left_as_it_was(made, out):
    """In another application's hands, and where nobody uses it; after an error too."""
    GlobalHydra.instance().clear()
    for around in (False, True):
        if around:
            context = initialize_config_dir(str(config_dir()), version_base="1.2")
        before = GlobalHydra.instance().hydra
        assert (before is not None) is around
        fcl_bench.run("stsa", out=out, **SMALL)
        with pytest.raises(fcl_bench.UserError):
            fcl_bench.run("stsa", bta=1)
        assert GlobalHydra.instance().hydra is before
    with context:
        pass


def test_threads_may_make_runs(out, made):
    found: dict[int, object] = {}

    def work(seed: int) -> None:
        try:
            found[seed] = fcl_bench.run("stsa", seed=seed, out=out, **SMALL).record["seed"]
        except Exception as error:
            found[seed] = error

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (0, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 0, 1: 1}


@pytest.mark.slow
def test_nothing_is_printed_or_written_elsewhere(tmp_path):
    """In a process of its own, where no command has arranged what is printed."""
    script = f"import fcl_bench; fcl_bench.run('stsa', profile='full', **{SMALL})"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [entry.name for entry in tmp_path.iterdir()] == ["outputs"]


def test_a_sweep_has_a_row_for_every_combination(out, made):
    frame = fcl_bench.sweep(["stsa", "nope"], seed=range(2), beta=[0.1], out=out, **SMALL)
    assert frame.equals(fcl_bench.sweep("stsa", ("nope",), seed=range(2), beta=[0.1], out=out, **SMALL))
    assert list(frame["method"]) == ["stsa", "stsa", "nope", "nope"]
    assert list(frame["seed"]) == [0, 1, 0, 1]
    assert list(frame.columns[:3]) == ["method", "seed", "beta"]
    good, bad = frame[:2], frame[2:]
    assert good["error"].isna().all()
    assert good["run_id"][0] == made.id
    assert good["A_T"][0] == made.metrics["A_T"]
    assert fcl_bench.load(good["path"][1]).record["seed"] == 1
    assert bad["error"].str.startswith("method=nope is not known (").all()
    assert bad["A_T"].isna().all()


def test_a_sweep_of_one_method_that_fails_throughout(out):
    with pytest.raises(fcl_bench.UserError, match=r"all 2 runs failed, the first: beta=-1.0 is out of range"):
        fcl_bench.sweep("stsa", beta=[-1, 0], out=out)
    assert {"A_T", "error"} <= set(fcl_bench.sweep(seed=[], out=out))


def test_runs_are_selected_as_by_fcl_tables(made, out):
    fcl_bench.run("afl", beta=0.5, out=out, **SMALL)
    everything = fcl_bench.runs(out)
    assert {made.id} < set(everything["run_id"])
    some = fcl_bench.runs(out=out, method="stsa", seed=[0], **{"method.M": 64})
    assert list(some["run_id"]) == [made.id]
    assert list(some["path"]) == [str(made.path)]
    with pytest.raises(fcl_bench.UserError, match="--where metod=stsa: unknown key metod"):
        fcl_bench.runs(out=out, metod="stsa")


def test_a_folder_without_runs_has_an_empty_frame(tmp_path):
    frame = fcl_bench.runs(out=tmp_path / "none", beta=0.1)
    assert frame.empty
    assert {"method", "A_T", "run_id", "path"} <= set(frame)


def test_a_run_is_loaded_by_path_id_and_name(made, out, tmp_path):
    for given in (made.path, str(made.path), made.path / "run.json", made.path.name, made.id, made.id[:6]):
        assert fcl_bench.load(given, out=out).id == made.id
    for given in ("", "zzzzzz", made.id[:3], tmp_path / "nothing"):
        with pytest.raises(fcl_bench.UserError):
            fcl_bench.load(given, out=out)
    with pytest.raises(fcl_bench.UserError, match="holds no complete run"):
        fcl_bench.load(tmp_path)


def test_a_loaded_run_shows_its_files(made):
    for name in ("tasks", "uploads"):
        assert len(getattr(made, name)) == len(pd.read_csv(made.path / f"{name}.csv"))
    np.testing.assert_array_equal(made.accuracy_matrix, pd.read_csv(made.path / "accuracy_matrix.csv"))
    assert list(made.class_accuracy.columns) == made.model.labels.tolist()
    assert made.client_accuracy.shape == (2, 2)
    counts = made.confusion()
    assert 100 * np.trace(counts) / counts.to_numpy().sum() == pytest.approx(made.metrics["A_T"], abs=1e-9)
    first = made.confusion(0)
    assert 100 * np.trace(first) / first.to_numpy().sum() == pytest.approx(made.metrics["accuracy"][0], abs=1e-9)
    assert made.config["method"]["M"] == 64
    assert f"A_T {made.metrics['A_T']:.2f}" in repr(made)
    with pytest.raises(fcl_bench.UserError, match="has no predictions.parquet"):
        _ = made.predictions
    with pytest.raises(fcl_bench.UserError, match="after=2 is no task"):
        made.confusion(2)


def test_a_figure_is_returned_and_not_written(made):
    before = sorted(made.path.iterdir())
    figure = made.plot()
    left, right = figure.axes[:2]
    line, _ = left.lines  # all classes seen; the newest task
    np.testing.assert_allclose(line.get_ydata(), made.metrics["accuracy"])
    shown = np.ma.filled(right.images[0].get_array(), np.nan)
    np.testing.assert_array_equal(shown, made.accuracy_matrix)
    assert sorted(made.path.iterdir()) == before


def test_a_damaged_run_is_refused(made, out, tmp_path):
    import shutil

    for name, what in (("tasks.csv", "is damaged: tasks.csv does not"), ("model.safetensors", "does not match")):
        copied = shutil.copytree(made.path, tmp_path / name)
        content = bytearray((copied / name).read_bytes())
        content[-5] ^= 1
        (copied / name).write_bytes(content)
        with pytest.raises(fcl_bench.UserError, match=what):
            fcl_bench.load(copied).predict(np.zeros((1, 8, 8), dtype=np.uint8))


def test_what_has_no_place_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fcl_bench.nothing
    assert {"run", "runs", "sweep", "load"} <= set(dir(fcl_bench))
