"""run.json holds the keys that `run_json` declares, with values of the declared types."""

from __future__ import annotations

import dataclasses
import json
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

import pytest

from fcl_bench.execution.plan import make_plan
from fcl_bench.execution.run_json import RunRecord
from tests.small_runs import run_in, settings_for

TINY = ("data=digits", "backbone=tiny", "backbone.width=4", "tasks=2", "clients=3", "partition.min_size=0")
TRAINED = ("rounds=1", "epochs=1", "augment=none")
RUNS = {
    "closed form": ("method=fedran", "method.M=32", "method.rank=8", "method.bounds=true", "tasks=2"),
    "first stage, few labels": (
        *("method=stsa", "method.M=32", *TINY, "adapt=fedavg", "label_rate=0.5"),
        *(f"adapt.training.{knob}" for knob in TRAINED),
    ),
    "tasks are named, drift and theory": (
        *("method=fedprotip", "method.columns=40", *TINY, "drift=2", "method.theory=2"),
        *(f"method.training.{knob}" for knob in TRAINED),
    ),
    "noise over a tree": (
        *("method=stsa", "method.M=16", "clients=4", "transport=tree", "transport.fan_in=2"),
        *("noise=gaussian", "noise.epsilon=8"),
    ),
    "a single task": ("method=afl", "tasks=1", "drift=2"),
    "rounds": ("method=fedavg", *TINY, "evaluate_rounds=1", *(f"method.training.{knob}" for knob in TRAINED)),
}


def wrong(value: Any, declared: Any, where: str) -> list[str]:
    """What in `value` is not as declared: missing and unknown keys, and values of another type."""
    origin, inner = get_origin(declared), get_args(declared)
    if declared is Any:
        return []
    if is_typeddict(declared) and isinstance(value, dict):
        hints, required = get_type_hints(declared), declared.__required_keys__
        if not required <= set(value) <= set(hints):
            return [f"{where}: {sorted({*(required - set(value)), *(set(value) - set(hints))})}"]
        return [line for key in value for line in wrong(value[key], hints[key], f"{where}.{key}")]
    if origin is list and isinstance(value, list):
        return [line for entry in value for line in wrong(entry, inner[0], f"{where}[]")]
    if origin is dict and isinstance(value, dict):
        return [line for key, entry in value.items() for line in wrong(entry, inner[1], f"{where}.{key}")]
    if origin is UnionType:
        return min((wrong(value, option, where) for option in inner), key=len)
    if origin is not None or is_typeddict(declared):
        return [f"{where}: {value!r} is not {declared}"]
    # JSON tells no 1.0 from 1; a truth value is no number.
    allowed = {float: (float, int), NoneType: NoneType}.get(declared, declared)
    fits = isinstance(value, allowed) and (declared is bool or not isinstance(value, bool))
    return [] if fits else [f"{where}: {value!r} is not {declared}"]


@pytest.mark.slow_cases("noise over a tree", "tasks are named, drift and theory")
@pytest.mark.parametrize("name", RUNS)
def test_every_key_is_declared_and_every_declared_key_is_there(tmp_path, name):
    outcome = run_in(tmp_path, *RUNS[name])
    written = json.loads((outcome.folder / "run.json").read_text())
    assert written == outcome.record
    assert wrong(written, RunRecord, "run.json") == []
    assert (written["adaptation"] is not None) is name.startswith("first stage")
    assert (written["routing"] is not None) is name.startswith("tasks are named")


def test_a_wrong_record_would_be_noticed(tmp_path):
    record: Any = run_in(tmp_path, *RUNS["a single task"]).record
    assert wrong({**record, "new": 1}, RunRecord, "run.json") == ["run.json: ['new']"]
    assert wrong({**record, "seed": True}, RunRecord, "run.json") == ["run.json.seed: True is not <class 'int'>"]
    metrics = {**record["metrics"], "accuracy": ["97"]}
    assert len(wrong({**record, "metrics": metrics}, RunRecord, "run.json")) == 1


@pytest.mark.parametrize(("M", "rank", "printed"), [(8192, 2048, "134.27"), (2048, 512, "9.57")])
def test_nominal_accounting_does_not_depend_on_what_was_sent(tmp_path, feature_file, M, rank, printed):
    """240 samples can't fill a rank of 512, the paper's table counts it all the same."""
    knobs = (f"method.M={M}", f"method.rank={rank}")
    plan = make_plan(settings_for(tmp_path, "data=features", f"data.path={feature_file}", *knobs))
    context = dataclasses.replace(plan.context, classes=100)
    counted = plan.settings.method.paper_bytes(context, [20] * 5)
    assert f"{counted['fedran_mib']:.2f}" == printed
