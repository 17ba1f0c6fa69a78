"""Input that no slip of the hand makes: absurd sizes, paths, choices, classes, signals; one line, and nothing left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fcl_bench import config
from tests.cli.test_wrong_input import written

LONG = "x" * 5000
#: Of a run, and the one group of none.
GROUPS = (*config.GROUPS, "logger")
#: Too large for a float, which is where Python raises an error of its own.
HUGE = "1" + 400 * "0"
TRAINED = "method=fedavg profile=quick backbone=tiny tasks=2 clients=2 method.training.rounds=1"

#: What was typed -> what the one line must hold.
HOSTILE = [
    (f"out={LONG}", "out=xxx"),
    (f"cache.dir={LONG}", "File name too long"),
    (f"data=features data.path={LONG}", "File name too long"),
    (f"backbone=resnet18 backbone.checkpoint={LONG}.pth", "File name too long"),
    ("out=~nobody9/x", "out=~nobody9/x begins with a user who is not here"),
    ("cache.dir=~nobody9/x", "cache.dir=~nobody9/x begins with a user"),
    ("data=features data.path=~nobody9/x.npz", "data.path=~nobody9/x.npz begins with a user"),
    ("data=imagefolder data.path=~nobody9/x", "data.path=~nobody9/x begins with a user"),
    ("data=cifar100 data.path=~nobody9/x", "data.path=~nobody9/x begins with a user"),
    ("backbone=resnet18 backbone.checkpoint=~nobody9/x.pth", "begins with a user"),
    *[(f"{group}={LONG}", f"{group}=xxx") for group in GROUPS],
    *[(f"{group}={{a:1}}", f"{group}={{a:1}} is no choice of the group {group}") for group in GROUPS],
    *[(f"{group}=[1,2]", f"{group}=[1,2] is no choice of the group {group}") for group in GROUPS],
    *[
        (f"{group}={value}", f"{group}={value} is no choice of the group {group}")
        for group in GROUPS
        for value in ("true", "null", "1", "-0.5", "1e3")
    ],
    *[(f"{group}=", f"{group}= is not known (") for group in GROUPS],
    *[(f"{group}._target_={wrong}", f"{group}._target_") for group in GROUPS for wrong in ("", "..x", "x..y", "null")],
    *[(f"{group}._target_=fcl_bench.protocol.context.Task", "is of another group") for group in GROUPS],
    *[
        (abstract, f"{abstract} is abstract: it only says what such classes have in common (a class of the group ")
        for abstract in (
            "faults._target_=fcl_bench.options.faults.choices.Faults",
            "split._target_=fcl_bench.data.splits.base.SampleSplit",
        )
    ],
    ("data.name=", "data.name is empty"),
    ("data=features data.path=", "data=features needs data.path"),
    ("backbone=timm backbone.name=", "backbone.name is empty"),
    ("data=cifar100 data.name=", "data.name is empty"),
    ("seed=99999999999999999999", "seed=99999999999999999999 is out of range (at most 9223372036854775807)"),
    *[(f"{key}={HUGE}", "is out of range (at most 9223372036854775807)") for key in ("seed", "method.budget_bytes")],
    *[(f"{key}=-{HUGE}", f"{key}=-1000") for key in ("seed", "clients", "method.M")],
    *[(f"{key}={HUGE}", "is out of range (at most 1e+38)") for key in ("beta", "label_rate", "method.ridge")],
    (f"faults=random faults.silent={HUGE}", "faults.silent=1000"),
    (f"logger=tensorboard +logger.x={HUGE}", "unknown key logger.x"),
    ("beta=1e300", "beta=1e+300 is out of range (at most 1e+38)"),
    (
        f"{TRAINED.replace('rounds=1', 'rounds=1000000000')}",
        "rounds=1000000000 is out of range (an integer from 1 to 1000000)",
    ),
    (f"{TRAINED.replace('rounds=1', 'rounds=99999999999999999999999')}", "is out of range"),
    (f"{TRAINED} method.training.weight_decay=1e20", "method.training.weight_decay=1e+20: training diverged"),
    (f"{TRAINED} method.training.weight_decay=1e300", "weight_decay=1e+300 is out of range"),
    (f"{TRAINED} method.training.lr=1e20", "method.training.lr=1e+20: training diverged"),
    ("--experimental-rerun x.pickle", "unknown option --experimental-rerun"),
    ("--experimental-rerun=x.pickle", "unknown option --experimental-rerun"),
    ("-m transport=in_process,ranks seed=0", "-m with transport=ranks: every rank would be a sweep of its own"),
    *[
        (typed, "is a key of Hydra's that fcl-bench sets itself (hydra/launcher, hydra.launcher.KEY)")
        for typed in (
            "hydra/job_logging=default",
            "hydra/hydra_logging=default",
            "hydra.output_subdir=5",
            "++hydra.output_subdir=.hydra",
            "-m hydra.output_subdir=5 seed=0,1",
            "-m hydra.job.chdir=true seed=0,1",
            "hydra.run.dir=there",
            "hydra.mode=MULTIRUN seed=0,1",
            "hydra.mode=MULTIRUN hydra/launcher=parallel clients=0,-1",
            "-m hydra.launcher._target_=nowhere.X seed=0,1",
            "-m hydra/launcher=parallel hydra.launcher._target_=pathlib.Path seed=0,1",
            "-m hydra.sweeper._target_=nowhere.X seed=0,1",
            "hydra.verbose=1",
        )
    ],
    ("seed=\x1b[31mred", r"seed=\x1b[31mred cannot be parsed"),
    ("\x1b[31mred", r"\x1b[31mred is not key=value"),
    ("", "error: an empty argument is not key=value"),
    ("out=\x1b[31mred", r"out=\x1b[31mred holds what cannot be printed"),
    ("data=features data.path=\x1b[31mred", r"data.path=\x1b[31mred holds what cannot be printed"),
    ("out=a\udcffb", r"out=a\udcffb holds what cannot be printed"),
    ("out=a\0b", r"out=a\x00b holds what cannot be printed"),
]


@pytest.mark.parametrize(("typed", "told"), HOSTILE, ids=[ascii(typed[:60]) for typed, _ in HOSTILE])
def test_it_is_one_short_line_and_nothing_is_left(command, tmp_path, monkeypatch, typed, told):
    monkeypatch.chdir(tmp_path)
    arguments = typed.split(" ")
    if not any(argument.startswith("out=") for argument in arguments):
        arguments.append("out=out")
    code, _, err = command(*arguments)
    assert code == 2
    [line] = err.splitlines()
    assert line.startswith("fcl-bench: error: ")
    assert told in line
    assert line.isprintable()
    assert len(line) < 3000
    assert {path for path in written(tmp_path) if not path.endswith(".lock") and "sweeps" not in path} == set()
    assert not list(tmp_path.glob("out/runs/*-*"))


def special_files(folder: Path) -> dict[str, Path]:
    """A FIFO, a socket, a device and a folder, all by the name of a file of features."""
    os.mkfifo(folder / "fifo.npz")
    with socket.socket(socket.AF_UNIX) as made, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # the path of a socket may not be long
        made.bind("socket.npz")
    (folder / "device.npz").symlink_to("/dev/zero")
    (folder / "folder.npz").mkdir()
    return {kind: folder / f"{kind}.npz" for kind in ("fifo", "socket", "device", "folder")}


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "folder"])
@pytest.mark.parametrize("data", ["features", "imagefolder", "cifar100"])
def test_special_files_are_refused_by_name_before_they_are_opened(command, tmp_path, kind, data):
    path = special_files(tmp_path)[kind]
    code, _, err = command(f"data={data}", f"data.path={path}", f"out={tmp_path}/out")
    assert code == 2
    [line] = err.splitlines()
    assert f"data.path={path}" in line
    if data == "features" or kind != "folder":
        assert f"is a {kind.replace('fifo', 'FIFO')} (" in line


def test_weights_that_are_a_fifo_are_refused(command, tmp_path):
    os.mkfifo(tmp_path / "weights.pth")
    code, _, err = command("backbone=resnet18", f"backbone.checkpoint={tmp_path}/weights.pth", f"out={tmp_path}/out")
    assert (code, err.count("\n")) == (2, 1)
    assert "is a FIFO (a .safetensors" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "word", "code"), [(signal.SIGTERM, "terminated", 143), (signal.SIGHUP, "hung up", 129)]
)
def test_signals_end_with_one_line_and_the_run_goes_on_later(tmp_path, number, word, code):
    """In the middle of a run that would take minutes."""
    line = [sys.executable, "-m", "fcl_bench", *TRAINED.split(), "method.training.rounds=500", f"out={tmp_path}/out"]
    process = subprocess.Popen(
        # Also where the tests themselves run under nohup.
        [*line, "checkpoint_rounds=1"],
        **{"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True},
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("out/runs/*/checkpoint/state.json")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err == f"fcl-bench: {word} (the same command goes on where it stopped)\n"


def test_what_the_user_ignores_stays_ignored(monkeypatch):
    """`nohup fcl-bench ...`: the terminal may close."""
    from fcl_bench.cli.command import run_command

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_command("x", lambda: os.kill(os.getpid(), signal.SIGHUP) or 0) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
