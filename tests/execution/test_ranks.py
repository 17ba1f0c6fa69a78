"""`transport=ranks`: two processes over gloo leave what one process does, and a rank that dies is told of in a line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from safetensors.numpy import load_file

from tests.conftest import REPOSITORY, write_features
from tests.execution.training_runs import TINY
from tests.small_runs import run_in

#: The process of these tests may use another number of threads than the ranks, and sums round by it.
ALIKE = "threads=1"

#: What two ranks may see differently.
OF_ITS_OWN = {"runtime", "environment", "transport", "files", "checksum"}


def started(folder: Path, plan: list[dict], threads: tuple[str, str] = ("1", "1")) -> list[subprocess.Popen]:
    """Both ranks, at work on `plan`, with so many threads in their processes."""
    (folder / "plan.json").write_text(json.dumps(plan))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [str(REPOSITORY / "src"), str(REPOSITORY)]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"PYTHONPATH": os.pathsep.join(paths)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.execution.rank_process", str(folder / "plan.json")],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": threads[rank]},
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def finished(ranks: list[subprocess.Popen]) -> tuple[str, str]:
    """What both said."""
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return said[0], said[1]


def same_but_for_the_clock(ranks: Path, alone: Path) -> None:
    """Two run folders: the same model, numbers and rows."""
    assert (ranks / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
    first, second = (json.loads((folder / "run.json").read_text()) for folder in (ranks, alone))
    assert first["transport"]["processes"] == 2
    assert {key for key in first if first[key] != second[key]} <= OF_ITS_OWN | {"adaptation"}
    for name in ("uploads.csv", "tasks.csv"):
        frames = [pd.read_csv(folder / name) for folder in (ranks, alone)]
        timed = [column for column in frames[0] if "seconds" in column]
        pd.testing.assert_frame_equal(*(frame.drop(columns=timed) for frame in frames), check_exact=True)


@pytest.fixture(scope="module")
def features(tmp_path_factory) -> tuple[str, ...]:
    path = tmp_path_factory.mktemp("features") / "features.npz"
    write_features(path)
    return ("data=features", f"data.path={path}", "tasks=3", "clients=3", "beta=0.5", ALIKE)


@pytest.fixture
def alone(caplog):
    """A run in this process, with its notes in run.log."""
    caplog.set_level("INFO", logger="fcl_bench")
    return run_in


#: One of a kind: sums, a merge in order, states of clients, pseudo-labels, clients that are late, a first stage.
CLOSED = (
    ("method=fedran", "method.M=48", "method.rank=8", "label_rate=0.5", "method.ssl=true", "method.tau=0"),
    ("method=afl", "faults=listed", "faults.late=[1@0]", "faults.silent=[2@1]", "on_bad_upload=drop"),
)
TRAINED = (
    ("method=scaffold", *TINY),
    ("method=fedicarl", *TINY),
)
#: On features, too.
LONG_CLOSED = (
    ("method=stsa_e", "method.M=48", "method.dummy_clients=4"),
    ("method=centred_sketch", "method.M=48", "method.rank=5"),
    ("method=afcl",),
)
LONG = (
    ("method=fedprotip", *TINY),
    ("method=fedavg", *TINY),
    (
        "method=stsa",
        "backbone=tiny",
        "backbone.width=4",
        "backbone.precision=bfloat16",
        "adapt=fedavg",
        "adapt.training.rounds=2",
        "adapt.training.epochs=1",
    ),
)


@pytest.mark.slow
def test_two_ranks_leave_what_one_process_does_and_a_dead_one_is_told_of(features, images, tmp_path, alone):
    """Then one process goes on from where the rank died, with the bits of a run that nothing disturbed."""
    dying = ("method=fedprotip", *TINY, *images, ALIKE)
    runs = [(*features, *own) for own in CLOSED] + [(*images, *own, ALIKE) for own in TRAINED]
    plan = [{"overrides": run} for run in runs] + [{"overrides": dying, "rank": 1, "dies": 1}]
    begin = time.monotonic()
    # The runs' own number of threads counts (`ALIKE`), not that of the processes.
    told, silent = finished(started(tmp_path, plan, threads=("1", "2")))
    assert time.monotonic() - begin < 240
    folders = [Path(line.split(" ", 1)[1]) for line in told.splitlines()[:-1]]
    assert len(folders) == len(runs), told
    for run, folder in zip(runs, folders, strict=True):
        same_but_for_the_clock(folder, alone(tmp_path / "alone", *run).folder)
        assert not (folder / "checkpoint").exists()
    assert told.splitlines()[-1] == (
        f"{len(runs)} error: client 1 was lost in task 1, round 0: its connection closed"
        " (the same command goes on from the last checkpoint)"
    )
    assert silent == ""
    # The clients' states lie where the ranks kept them, and one process takes them over.
    resumed = alone(tmp_path / "out", *dying)
    assert "going on after task 1" in (resumed.folder / "run.log").read_text()
    whole = alone(tmp_path / "alone", *dying)
    assert (resumed.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_other_methods_over_two_ranks(features, images, tmp_path, alone):
    runs = [(*features, *own) for own in LONG_CLOSED] + [(*images, *own, ALIKE) for own in LONG]
    told, _ = finished(started(tmp_path, [{"overrides": run} for run in runs]))
    folders = [Path(line.split(" ", 1)[1]) for line in told.splitlines()]
    for run, folder in zip(runs, folders, strict=True):
        same_but_for_the_clock(folder, alone(tmp_path / "alone", *run).folder)


@pytest.mark.slow
def test_rank_1_tells_of_a_dead_rank_0_and_two_new_ranks_go_on(images, tmp_path, alone):
    dying = ("method=scaffold", *TINY, *images, ALIKE)
    _, told = finished(started(tmp_path, [{"overrides": dying, "rank": 0, "dies": 1}]))
    assert (
        told == "0 error: rank 0 was lost: its connection closed (the same command goes on from the last checkpoint)\n"
    )
    said, _ = finished(started(tmp_path, [{"overrides": dying}]))
    folder = Path(said.split(" ", 1)[1].strip())
    assert "going on after task 1" in (folder / "run.log").read_text()
    same_but_for_the_clock(folder, alone(tmp_path / "alone", *dying).folder)


@pytest.mark.slow
def test_the_servers_rank_has_no_secret_of_secure_sums_and_a_rank_that_died_is_replaced(features, tmp_path, alone):
    """Rank 0 has the server and no client. What is drawn again after the death of rank 1 are other keys."""
    run = (*features, "method=afl", "secure=sums", "wire.dtype=float64")
    silent = (*run, "faults=listed", "faults.silent=[1@1]")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    told, _ = finished(started(first, [{"overrides": run}, {"overrides": silent, "rank": 1, "dies": 2}]))
    line = (
        "1 error: client 0 was lost in task 2, round 0: its connection closed (the same command goes on from the last"
    )
    assert told.splitlines()[-1].startswith(line), told
    told_again, _ = finished(started(second, [{"overrides": run}]))
    once, twice = (Path(text.splitlines()[0].split(" ", 1)[1]) for text in (told, told_again))
    assert json.loads((once / "run.json").read_text())["secure"] == "secure sums"
    assert json.loads((once / "run.json").read_text())["transport"]["processes"] == 2
    secrets = [set((folder / "secrets-1").read_text().split()) for folder in (first, second)]
    assert all(len(own) >= 3 * (3 * 2 + 3 * 2) for own in secrets)  # tasks, keys of three clients, keys of three pairs
    assert not secrets[0] & secrets[1], "fresh in every run"
    for folder, own in zip((first, second), secrets, strict=True):
        got = (folder / "received-0").read_bytes()
        assert len(got) > 1000
        assert not any(bytes.fromhex(secret) in got for secret in own)
    # The first run has no client that drops out, so that the server never works out a key; rank 0 has no client.
    assert not (second / "secrets-0").exists()
    # Where client 1 drops out after its keys, the server works out that client's keys of that round, and no other.
    worked_out = set((first / "secrets-0").read_text().split())
    assert len(worked_out) == 1 + 2
    simulated = alone(tmp_path / "alone", *run)
    ours, again, theirs = (load_file(folder / "model.safetensors") for folder in (once, twice, simulated.folder))
    assert all((ours[name] == theirs[name]).all() and (again[name] == theirs[name]).all() for name in theirs)
    # The same command goes on from the checkpoint, with other processes and other keys.
    (first / "secrets-1").unlink()
    told, _ = finished(started(first, [{"overrides": silent}]))
    resumed, whole = Path(told.splitlines()[0].split(" ", 1)[1]), alone(tmp_path / "alone", *silent)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (resumed, whole.folder))
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert len(set((first / "secrets-1").read_text().split())) == 3 * 2 + 3 * 2, "the last task alone was left"
