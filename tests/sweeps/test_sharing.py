"""A job of a sweep, which takes over what earlier jobs made, leaves what it leaves alone: every file, bit for bit."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hydra import compose
from safetensors.numpy import load_file

from fcl_bench import composition
from fcl_bench.data import shared as module
from fcl_bench.execution import plan
from tests.data.split_cases import dataset_of
from tests.small_runs import settings_for

SMALL = ("tasks=2", "clients=3", "cache.enabled=false")
#: Methods on frozen features, and one that trains a network on the images.
SWEEPS = {
    "features": ("method=fedran,stsa", "method.M=512", "seed=0,1"),
    "images": (
        *("method=fedavg", "backbone=tiny", "backbone.width=2", "seed=0,1"),
        *("method.training.rounds=1", "method.training.epochs=1"),
    ),
}
#: What says how long something took, and where.
TIMES = re.compile(r"seconds|memory|environment|cache_hit|checksum|files|runtime")


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(entry) for key, entry in value.items() if not TIMES.search(key)}
    return [without_times(entry) for entry in value] if isinstance(value, list) else value


def left(out):
    """Everything of each run that is no time: its record, its model's tensors, who held what, and what the log says."""
    found = {}
    for folder in sorted((out / "runs").iterdir()):
        if not (folder / "run.json").exists():
            continue
        with np.load(folder / "partition.npz") as file:
            partition = {name: file[name].tobytes() for name in file.files}
        model = {name: value.tobytes() for name, value in load_file(folder / "model.safetensors").items()}
        said = [line.split(" ", 2)[2] for line in (folder / "run.log").read_text().splitlines()]
        record = without_times(json.loads((folder / "run.json").read_text()))
        found[folder.name] = record, model, partition, said, (folder / "class_accuracy.csv").read_bytes()
    return found


@pytest.mark.slow_cases("features", "images")
@pytest.mark.parametrize("kind", SWEEPS)
def test_a_job_in_a_sweep_is_the_job_alone(kind, command, tmp_path):
    overrides = (*SWEEPS[kind], *SMALL)
    code, _, err = command("-m", *overrides, f"out={tmp_path / 'sweep'}")
    assert code == 0, err
    [sweep] = (tmp_path / "sweep" / "sweeps").iterdir()
    jobs = [json.loads(path.read_text())["overrides"] for path in (sweep / "jobs").glob("*.json")]
    for job in jobs:
        alone = [f"out={tmp_path / 'alone'}" if override.startswith("out=") else override for override in job]
        assert command(*alone)[0] == 0
    together, alone = left(tmp_path / "sweep"), left(tmp_path / "alone")
    assert len(together) == len(jobs) > 1
    assert together == alone


@pytest.mark.slow
def test_jobs_take_over_what_others_made_and_say_so(command, tmp_path):
    assert command("-m", "method=afl", "seed=0,1", *SMALL, f"out={tmp_path}")[0] == 0
    records = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/run.json")]
    first, second = (record["runtime"] for record in sorted(records, key=lambda record: record["seed"]))
    assert (first["feature_cache_hit"], second["feature_cache_hit"]) == (False, True)
    assert first["feature_seconds"] > 0 == second["feature_seconds"]
    assert first["feature_cost_seconds"] == second["feature_cost_seconds"]
    assert not module._current


def test_tasks_follow_the_names_of_the_domains(tmp_path, monkeypatch):
    """Two copies of the same samples may name their domains differently, and `split.order` goes by names."""
    labels, domains = ([0, 1, 0], [0, 1]), ([0, 0, 1], [0, 1])
    settings = settings_for(tmp_path, "split=domain_incremental", "split.order=[a,b]", "tasks=2", "clients=1")
    firsts = []
    with module.sharing():
        for names in (("a", "b"), ("b", "a"), ("a", "b")):
            dataset = dataset_of(*labels, domains, names)
            monkeypatch.setattr(plan, "loaded", lambda _, dataset=dataset: dataset)
            firsts.append(plan.deal(settings).stream.train[0].tolist())
    assert firsts == [[0, 1], [2], [0, 1]]


@pytest.mark.slow
def test_jobs_of_the_same_choices_are_composed_together(command, tmp_path, monkeypatch):
    asked = []
    composition._of_choices.cache_clear()
    monkeypatch.setattr(
        "hydra.compose", lambda *given, **keys: asked.append(keys["overrides"]) or compose(*given, **keys)
    )
    assert command("-m", "method=afl", "seed=0,0,1", *SMALL, f"out={tmp_path}")[0] == 0
    assert asked == [["method=afl"]]
    assert len(list((tmp_path / "runs").glob("*/run.json"))) == 2
