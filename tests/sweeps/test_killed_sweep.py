"""kill -9 at random moments of a sweep, then the same command: the records of a sweep that nothing disturbed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fcl_bench.files import read_json, write_json
from tests.conftest import REPOSITORY, write_features
from tests.small_runs import interrupted_in, run_in

#: A sweep of four runs of three tasks each.
SWEEP = ("method.M=48", "method.rank=8", "tasks=3", "clients=2", "beta=0.5", "method=fedran,centred_sketch", "seed=0,1")
RUNS = 4


def sweep_in_fork(arguments: list[str]) -> None:
    """The command in this process, a group of its own; without pictures, which are most of so short a run's time."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    import fcl_bench.execution.run
    from fcl_bench.cli.app import main

    fcl_bench.execution.run.drawn = lambda *_: {}
    sys.argv = ["fcl-bench", *arguments]
    sys.exit(main())


class Forked:
    """A process that is there at once, since its parent has imported everything."""

    def __init__(self, arguments: list[str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["fcl_bench.execution.run", "fcl_bench.cli.app", "fcl_bench.execution.screen", "hydra"]
        )
        self._process = context.Process(target=sweep_in_fork, args=(arguments,))
        self._process.start()

    def wait(self, seconds: float | None = None) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode

    def kill(self) -> None:
        assert self._process.pid is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not come to its own group yet
            self._process.kill()
        self._process.join()


class Spawned:
    """The command as a shell starts it, with two workers."""

    def __init__(self, arguments: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fcl_bench", *arguments, "hydra/launcher=parallel", "hydra.launcher.n_jobs=2"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=REPOSITORY,
        )

    def wait(self, seconds: float | None = None) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def arguments(folder: Path, data: Path) -> list[str]:
    return ["-m", f"out={folder}", "data=features", f"data.path={data}", f"cache.dir={data.parent}/cache", *SWEEP]


def results(out: Path) -> dict[str, dict[str, Any]]:
    """Everything of each run that must not depend on interruptions, by folder name."""
    found: dict[str, dict[str, Any]] = {}
    for path in (out / "runs").glob("*/run.json"):
        record, folder = read_json(path), path.parent
        uploads = pd.read_csv(folder / "uploads.csv").drop(columns="client_seconds")
        timed = ("runtime", "environment", "files", "checksum", "report")
        found[folder.name] = {
            "record": {key: value for key, value in record.items() if key not in timed},
            "files": sorted(entry.name for entry in folder.iterdir()),
            "uploads": uploads.to_dict("list"),
            **{name: (folder / name).read_bytes() for name in ("model.safetensors", "partition.npz")},
            "matrix": (folder / "accuracy_matrix.csv").read_bytes(),
        }
    return found


def tasks_kept(run: Path) -> int:
    """Complete tasks in the checkpoint on disk."""
    try:
        return int(json.loads((run / "checkpoint" / "state.json").read_text())["tasks_done"])
    except FileNotFoundError:
        return 0


def check_log(run: Path) -> None:
    """No task is learnt again once it is kept, and nothing starts again once the run is complete."""
    log = (run / "run.log").read_text()
    kept = re.findall(r"task (\d+) of 3 is kept", log)
    assert len(kept) == len(set(kept)), log
    assert "damaged" not in log, log
    before, _, after = log.partition("run is complete")
    assert "run starts" not in after, log
    last = 0
    for attempt in before.split("run starts")[1:]:
        # At least, since the kill may have come between the checkpoint and its line.
        if attempt.count("is kept"):
            found = re.search(r"going on after task (\d) of 3", attempt)
            assert (0 if found is None else int(found[1])) >= last, log
            last = int(re.findall(r"task (\d) of 3 is kept", attempt)[-1])


def kill_and_resume(
    kills: int, start: Callable[[list[str]], Any], folder: Path, data: Path, whole: Path, longest: float, seed: int
) -> list[float]:
    """Kill that many sweeps, in as many fresh folders as it takes; returns the moments."""
    rng = random.Random(seed)
    moments: list[float] = []
    expected = results(whole)
    assert len(expected) == RUNS
    for number in range(kills + 1):
        out = folder / f"{number}"
        while True:
            process = start(arguments(out, data))
            moment = rng.uniform(0, longest)
            code = process.wait(moment if len(moments) < kills else 600)
            if code is not None:
                assert code == 0
                break
            process.kill()
            moments.append(moment)
            done = {path.parent for path in (out / "runs").glob("*/run.json")}
            for run in set((out / "runs").glob("*-*")) - done:
                assert tasks_kept(run) in range(4)
        assert results(out) == expected
        for run in (out / "runs").glob("*-*"):
            check_log(run)
        if len(moments) == kills:
            return moments
    raise AssertionError("the sweep was never there to be killed")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Data, the undisturbed sweep's folder, and how long it took."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # the fork server keeps it
        folder = tmp_path_factory.mktemp("killed")
        data = write_features(folder / "f.npz")
        Forked(["--version"]).wait(60)  # the server's start is no part of what follows
        begin = time.monotonic()
        assert Forked(arguments(folder / "whole", data)).wait(120) == 0
        return folder, data, folder / "whole", time.monotonic() - begin


def test_a_sweep_that_is_killed_at_random_moments_ends_as_if_nothing_had_happened(quick):
    folder, data, whole, seconds = quick
    moments = kill_and_resume(5, Forked, folder / "killed", data, whole, longest=seconds, seed=0)
    assert len(moments) == 5


@pytest.mark.slow
@pytest.mark.parametrize("start", [Forked, Spawned])
def test_twenty_kills(quick, tmp_path, start):
    _, data, whole, seconds = quick
    longest = 0.7 * seconds
    if start is Spawned:
        whole = tmp_path / "whole"
        begin = time.monotonic()
        assert start(arguments(whole, data)).wait(600) == 0
        longest = time.monotonic() - begin
    moments = kill_and_resume(20, start, tmp_path, data, whole, longest, seed=1)
    print(f"\nkilled after {', '.join(f'{moment:.2f}' for moment in moments)} s of {longest:.2f} s at most")


def test_two_sweeps_at_once_do_each_run_once(quick):
    folder, data, whole, _ = quick
    out = folder / "both"
    both = [Forked(arguments(out, data)) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert results(out) == results(whole)
    for run in (out / "runs").glob("*-*"):
        log = (run / "run.log").read_text()
        assert (log.count("run starts"), log.count("run is complete")) == (1, 1)
    reports = [json.loads(path.read_text()) for path in (out / "sweeps").glob("*/jobs/*.json")]
    assert len(reports) == 2 * RUNS
    assert sum(not report["was_complete"] for report in reports) == RUNS


SMALL = ("method.M=32", "method.rank=8", "tasks=2", "clients=2")


def changed(path: Path) -> None:
    """The file as another version of the program would have written it."""
    content = read_json(path)
    write_json(path, {**content, "schema": content["schema"] + 1})


@pytest.mark.slow
def test_a_complete_run_of_another_schema_is_done_again(tmp_path, caplog):
    outcome = run_in(tmp_path, *SMALL)
    changed(outcome.folder / "run.json")
    again = run_in(tmp_path, *SMALL)
    assert "is of another version: " in caplog.text
    assert json.dumps(again.record["metrics"]) == json.dumps(outcome.record["metrics"])


def test_an_interrupted_run_of_another_schema_starts_again(tmp_path, monkeypatch, caplog):
    with interrupted_in(1, monkeypatch):
        run_in(tmp_path, *SMALL)
    [state] = (tmp_path / "runs").glob("*/checkpoint/state.json")
    changed(state)
    assert not run_in(tmp_path, *SMALL).was_complete
    assert "starting from the first task" in caplog.text


def test_a_complete_run_needs_no_checkpoint(tmp_path):
    """A process killed between the record and the removal of its checkpoint leaves both."""
    outcome = run_in(tmp_path, *SMALL)
    left = outcome.folder / "checkpoint"
    left.mkdir()
    (left / "state.json").write_text("{}")
    assert run_in(tmp_path, *SMALL).was_complete
    assert not left.exists()


def test_a_checkpoint_is_tensors_rows_of_numbers_and_json(tmp_path, monkeypatch):
    with interrupted_in(1, monkeypatch):
        run_in(tmp_path, *SMALL)
    [folder] = (tmp_path / "runs").glob("*/checkpoint")
    kinds = {file.suffix for file in folder.iterdir()}
    assert kinds == {".json", ".safetensors", ".bin"}
    assert read_json(folder / "state.json")["schema"] > 0
