"""A record that was read has the types that run_json.py declares, or it is taken for damaged."""

from __future__ import annotations

import copy
import json
import shutil

import pytest

from fcl_bench.engine.checkpoint import read_json, write_json
from fcl_bench.execution.folder import RunFolder
from fcl_bench.execution.record_form import misfit
from tests.small_runs import run_in

pytestmark = pytest.mark.usefixtures("no_pictures")
NOISE_OVER_A_TREE = ("noise=gaussian", "noise.epsilon=8", "transport=tree", "transport.fan_in=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_in(tmp_path_factory.mktemp("run"), "method=afl", "tasks=2", "clients=2")


def test_what_runs_write_fits(run, tmp_path):
    record = read_json(run.folder / "run.json")
    assert misfit(record) == ""
    noisy = run_in(tmp_path, "method=stsa", "method.M=16", "tasks=2", "clients=4", *NOISE_OVER_A_TREE)
    assert misfit(noisy.record) == ""
    assert misfit(record | {"new": [1]}) == "", "what nobody declared is passed by"


WRONG = [
    (("metrics", "A_T"), "x", "metrics.A_T is no float"),
    (("metrics", "accuracy"), [1.0, "x"], "metrics.accuracy[1] is no float"),
    (("metrics", "accuracy"), {}, "metrics.accuracy is no list"),
    (("seed",), 1.5, "seed is no int"),
    (("tasks",), True, "tasks is no int"),
    (("method",), None, "method is no str"),
    (("runtime",), [], "runtime is no mapping"),
    (("files", "tasks.csv"), 5, "files.tasks.csv is no str"),
    (("report",), None, "report is no mapping"),
    (("runtime",), {}, "runtime lacks seconds_per_task"),
    (("noise",), 1, "noise is no str"),
    (("secure",), None, "secure is no str"),
    (("absences", "lost"), "1", "absences.lost is no int"),
    (("client_accuracy",), {}, "client_accuracy lacks clients"),
    (("client_accuracy", "mean"), "x", "client_accuracy.mean is no float"),
    (("privacy", "guarantee"), {"epsilon": 1.0}, "privacy.guarantee lacks delta"),
    (("transport",), "tree", "transport is no mapping"),
    (("transport",), {"name": "tree"}, "transport lacks processes"),
    (("transport", "levels"), 5, "transport.levels is no list"),
    (("transport", "levels"), [{"level": 1}], "transport.levels[0] lacks nodes"),
    (("communication", "raw"), {"kind": "features"}, "communication.raw lacks sample_bytes"),
]


@pytest.mark.parametrize(("keys", "value", "told"), WRONG)
def test_what_does_not_fit_is_named(run, keys, value, told):
    record = copy.deepcopy(run.record)
    inner = record
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    assert misfit(record) == told


@pytest.mark.parametrize("key", ["metrics", "seed", "files", "absences"])
def test_every_declared_key_must_be_there(run, key):
    assert misfit({name: value for name, value in run.record.items() if name != key}) == f"it lacks {key}"


def test_a_forged_record_is_done_again_by_runs_and_left_out_by_tables(run, tmp_path, in_process, caplog):
    """Its checksum is right; tables were a traceback, and a run that was complete printed one."""
    from fcl_bench.cli.tables import main

    shutil.copytree(run.folder.parents[1], tmp_path / "out")
    [path] = tmp_path.glob("out/runs/*/run.json")
    write_json(path, {**read_json(path), "backbone": 0.5})
    assert RunFolder(path.parent).complete_record() is None
    assert "has a damaged run.json (backbone is no str)" in caplog.text
    code, _, err = in_process(main, "fcl-tables", "--out", tmp_path / "out")
    assert code == 2
    assert "no complete run in" in err.splitlines()[-1]
    again = run_in(tmp_path / "out", "method=afl", "tasks=2", "clients=2")
    assert not again.was_complete
    assert json.loads(path.read_text())["backbone"] == run.record["backbone"]
