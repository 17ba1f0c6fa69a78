"""`fcl-bench plan`: bytes as the runs then count them, seconds by earlier runs, and nothing written."""

from __future__ import annotations

import json

import pytest

from fcl_bench.cli.overrides import composed_as_typed
from fcl_bench.cli.plan import upload_bytes
from fcl_bench.config import load_settings
from fcl_bench.execution.plan import make_plan
from fcl_bench.execution.screen import bytes_text
from tests.small_methods import TRAINING

SMALL = ("tasks=2", "clients=2")


def cells(out: str) -> list[list[str]]:
    """The rows of the table, without its header."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]


def test_of_a_method_without_an_earlier_run_seconds_are_not_known_and_nothing_is_written(tmp_path, command):
    code, out, err = command("plan", "method=stsa", "method.M=64", *SMALL, f"out={tmp_path / 'out'}")
    assert (code, err) == (0, "")
    [[_, seconds, upload, memory, disk, state]] = cells(out)
    assert (seconds, memory, disk, state) == ("not known", "not known", "not known", "to do")
    assert upload == f"{4 * 64 * (64 + 5) / 1024:.1f} KiB"
    assert "1 of 1 runs to do; seconds of 1 are not known: no complete run here" in out
    assert not (tmp_path / "out").exists()


def test_a_sweep_says_what_is_done_what_changes_nothing_and_what_cannot_run(tmp_path, command):
    keys = ("method.M=64", *SMALL, f"out={tmp_path}")
    assert command("method=stsa", "beta=1", *keys)[0] == 0
    code, out, err = command("plan", "-m", "method=stsa,fedavg", "beta=0.1,1", "seed=0", *keys)
    assert (code, err) == (0, "")
    states = {row[0]: (row[1], row[-1]) for row in cells(out)}
    assert states["method=stsa beta=1"][1] == "complete"
    seconds, state = states["method=stsa beta=0.1"]
    assert state == "to do"
    [file] = tmp_path.glob("runs/*/run.json")
    done = json.loads(file.read_text())["runtime"]["total_seconds"]
    assert float(seconds.removesuffix(" s")) == pytest.approx(done, abs=0.06)  # the same work
    assert states["method=fedavg beta=1"] == ("", "cannot run")
    assert "unknown key method.M: it belongs to" in out
    assert "1 of 4 runs to do, one by one in about " in out
    assert "method=stsa: accuracy does not depend on beta, but for rounding." in out


def test_keys_that_determine_nothing_make_one_run(tmp_path, command):
    code, out, _ = command(
        "plan", "-m", "partition=iid", "beta=0.1,1", "method=fedncm", *SMALL, f"out={tmp_path / 'out'}"
    )
    assert code == 0
    assert "one and the same run: beta=0.1; beta=1" in out
    assert "1 of 2 runs to do" in out
    code, out, _ = command("plan", "-m", "method.search=[a],[b]", "method=fedncm", *SMALL)
    assert code == 2
    assert [row[0] for row in cells(out)] == ["method.search=[a]", "method.search=[b]"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--bogus",), "unrecognized arguments: --bogus (fcl-bench plan --help lists the options)"),
        (("methd=afl",), "unknown key methd"),
        (("method=fedavg",), "backbone=pixels has nothing to train"),
        (("-m", "tasks=[1"), "cannot be parsed"),
        (("-m", "method=no"), "method=no is not known"),
        (("method=afl,stsa",), "names several values"),
        (("afl",), "afl is not key=value (did you mean method=afl?)"),
    ],
)
def test_wrong_input_is_told_in_one_line(arguments, told, command):
    code, out, err = command("plan", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_a_sweep_of_which_no_run_can_start_ends_with_2(command):
    code, out, _ = command("plan", "-m", "method=fedavg,fedprox", *SMALL)
    assert code == 2
    assert "backbone=pixels has nothing to train" in out


@pytest.mark.slow_cases("fedavg", "fedewc", "fedavg features")
@pytest.mark.parametrize(
    ("method", "keys"),
    [
        pytest.param("stsa", ("method.M=32",), id="stsa"),
        pytest.param("afl", ("method.M=32", "wire.dtype=float16", "wire.gram=packed"), id="afl packed"),
        pytest.param("fedncm", (), id="fedncm"),
        pytest.param("fedavg", TRAINING, id="fedavg"),
        pytest.param("fedewc", TRAINING, id="fedewc"),
        pytest.param("fedavg", ("method.trains=features", "method.training.rounds=2"), id="fedavg features"),
    ],
)
def test_the_upload_is_the_one_that_the_run_counts(method, keys, tmp_path, command):
    typed = [f"method={method}", *keys, *SMALL, "seed=3", f"out={tmp_path}"]
    planned = upload_bytes(make_plan(load_settings(composed_as_typed(typed))))
    assert command(*typed)[0] == 0
    [file] = tmp_path.glob("runs/*/run.json")
    counted = json.loads(file.read_text())["communication"]["up_max_bytes"]
    # Its importances are of the weights that train alone, and the plan takes them to be of the whole model.
    assert counted <= planned <= counted * (1.01 if method == "fedewc" else 1)


def test_what_a_run_takes_is_told_by_one_that_had_as_much_to_do(tmp_path, command):
    keys = ("method=stsa", "method.M=64", *SMALL, f"out={tmp_path}")
    assert command(*keys)[0] == 0
    [folder] = tmp_path.glob("runs/stsa-*")
    peak = json.loads((folder / "run.json").read_text())["runtime"]["peak_memory_bytes"]
    held = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    for typed, known in ((("method.gamma=7", "seed=1"), True), (("method.M=32",), False), (("clients=3",), False)):
        [[_, seconds, _, memory, disk, _]] = cells(command("plan", *keys, *typed)[1])
        assert (memory, disk) == ((bytes_text(peak), bytes_text(held)) if known else ("not known", "not known"))
        assert (seconds == "not known") != known
