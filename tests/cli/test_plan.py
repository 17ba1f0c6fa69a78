"""`fcl-bench plan`: bytes as the runs then count them, the rest by a short try, and nothing written."""

from __future__ import annotations

import itertools
import json
from typing import ClassVar

import numpy as np
import pytest
import torch

from fcl_bench.backbones.backbone import Extractor
from fcl_bench.cli.estimate import Estimate, _FewBatches, estimated
from fcl_bench.cli.overrides import composed_as_typed
from fcl_bench.cli.plan import upload_bytes
from fcl_bench.config import load_settings
from fcl_bench.data.sources.base import Split
from fcl_bench.execution.plan import make_plan
from fcl_bench.execution.screen import bytes_text
from tests.small_methods import TRAINING

SMALL = ("tasks=2", "clients=2")


def cells(out: str) -> list[list[str]]:
    """The rows of the table, without its header."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]


@pytest.fixture
def tried(monkeypatch):
    """The plans of the runs that were tried, none of them in truth."""
    found = []
    monkeypatch.setattr("fcl_bench.cli.plan.estimated", lambda plan: found.append(plan) or Estimate(1.0, 2**20, 2**10))
    return found


def test_a_try_says_what_a_run_takes_and_nothing_stays_of_it(tmp_path, command, monkeypatch):
    keys = ("method=stsa", "method.M=128", "tasks=3", "clients=2", f"out={tmp_path / 'out'}")
    tried = []
    monkeypatch.setattr("fcl_bench.cli.plan.estimated", lambda plan: tried.append(estimated(plan)) or tried[0])
    code, out, err = command("plan", *keys)
    assert (code, err) == (0, "")
    [[_, _, upload, memory, _, state]] = cells(out)
    assert (upload, memory, state) == ("66.0 KiB", bytes_text(tried[0].memory), "to do")
    assert "1 of 1 runs to do, one by one in about " in out
    assert not (tmp_path / "out").exists()
    assert command(*keys)[0] == 0
    [folder] = tmp_path.glob("out/runs/stsa-*")
    runtime = json.loads((folder / "run.json").read_text())["runtime"]
    assert 0.1 < tried[0].seconds / runtime["total_seconds"] < 10  # the machine may be busy
    assert tried[0].memory == pytest.approx(runtime["peak_memory_bytes"], rel=0.5)
    held = sum(file.stat().st_size for file in folder.iterdir())
    assert tried[0].disk == pytest.approx(held + 107_000, rel=0.1)  # tests draw no picture


def test_times_of_a_try_are_multiplied_by_rounds_and_tasks(monkeypatch):
    """By a clock that counts: each look at it is a second, so that all that is timed takes the same."""
    seconds = []
    for rounds, tasks in ((1, 2), (10, 4)):
        keys = ["method=fedavg", "method.trains=features", f"method.training.rounds={rounds}", f"tasks={tasks}"]
        plan = make_plan(load_settings(composed_as_typed([*keys, "clients=2", "partition=iid"])))
        ticks = itertools.count()
        monkeypatch.setattr("time.perf_counter", lambda ticks=ticks: float(next(ticks)))
        seconds.append(estimated(plan).seconds)
        monkeypatch.undo()
    assert 5 < seconds[1] / seconds[0] < 20  # rounds ten times, tasks twice; tests are not for each round


def test_a_try_of_one_task_knows_how_the_model_grows(monkeypatch):
    keys = ["method=fedavg", "method.trains=features", "method.training.rounds=1", "tasks=5", "clients=2"]
    whole = estimated(make_plan(load_settings(composed_as_typed(keys))))
    monkeypatch.setattr("fcl_bench.cli.estimate._MOST_SECONDS", 0.0)
    one = estimated(make_plan(load_settings(composed_as_typed(keys))))
    assert one.disk == whole.disk


def test_features_that_the_cache_lacks_are_estimated_from_a_few_batches():
    class Slow(Extractor):
        identity: ClassVar = {"backbone": "slow"}
        asked = 0

        def dimension(self, split: Split) -> int:
            return 4

        def batches(self, split: Split, start: int = 0):
            for begin in range(start, len(split), 10):
                self.asked += 1
                yield torch.full((10, 4), float(begin))

    split = Split(np.zeros(600, dtype=np.int64), np.zeros((600, 2)), "")
    few = _FewBatches(Slow())
    [rows] = few.batches(split)
    assert rows.shape == (600, 4)
    assert few._whole.asked == 3
    assert few.left > 0


def test_a_sweep_says_what_is_done_what_changes_nothing_and_what_cannot_run(tmp_path, command, tried):
    keys = ("method.M=64", *SMALL, f"out={tmp_path}")
    assert command("method=stsa", "beta=1", *keys)[0] == 0
    code, out, err = command("plan", "-m", "method=stsa,fedavg", "beta=0.1,1", "seed=0", *keys)
    assert (code, err) == (0, "")
    states = {row[0]: (row[1], row[-1]) for row in cells(out)}
    assert states["method=stsa beta=1"][1] == "complete"
    [file] = tmp_path.glob("runs/*/run.json")
    done = json.loads(file.read_text())["runtime"]["total_seconds"]
    assert float(states["method=stsa beta=1"][0].removesuffix(" s")) == pytest.approx(done, abs=0.06)
    assert states["method=stsa beta=0.1"][1] == "to do"
    assert states["method=fedavg beta=1"] == ("", "cannot run")
    assert "unknown key method.M: it belongs to" in out
    assert "1 of 4 runs to do, one by one in about " in out
    assert "method=stsa: accuracy does not depend on beta, but for rounding." in out


def test_keys_that_determine_nothing_make_one_run(tmp_path, command, tried):
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


def test_runs_with_as_much_to_do_share_a_try(tmp_path, command, tried):
    keys = ("-m", "method=stsa", *SMALL, f"out={tmp_path}", "seed=0,1")
    rows = cells(command("plan", *keys, "method.M=32,64", "beta=0.1,1")[1])
    assert (len(rows), len(tried)) == (8, 2)
    assert {tuple(row[3:5]) for row in rows} == {("1.00 MiB", "1.0 KiB")}


def test_a_first_stage_is_not_tried(tmp_path, command):
    typed = ("plan", "adapt=fedavg", "backbone=tiny", "method=fedncm", *SMALL, f"out={tmp_path}")
    code, out, _ = command(*typed)
    assert code == 0
    assert cells(out)[0][1] == "not known"
    assert "seconds of 1 are not known: a first stage, and clients in other processes, are not tried" in out
