"""The fingerprint by which tables keep runs on the features of different networks apart."""

from __future__ import annotations

import json
import shutil

import pytest
import timm
import torch

from fcl_bench.files import content_hash, file_checksum
from fcl_bench.results.collect import collect
from fcl_bench.results.summarise import summarise, used_runs
from tests.small_runs import run_in

NAME = "test_resnet"
SMALL = ("method=afl", "tasks=2", "clients=2")
NEW_STEM = (*SMALL, "backbone=timm", f"backbone.name={NAME}", "backbone.stem=cifar", "backbone.transform.size=8")


def weights(folder, seed: int) -> str:
    torch.manual_seed(seed)
    file = folder / f"{seed}.pt"
    torch.save(timm.create_model(NAME, num_classes=0).state_dict(), file)
    return str(file)


@pytest.fixture
def started(tmp_path):
    """What runs on a drawn stem start from -> their records: no checkpoint, one file in two places, and another."""
    first, second = weights(tmp_path, 1), weights(tmp_path, 2)
    moved = shutil.copy(first, tmp_path / "moved.pt")
    kinds = {
        "scratch": ["backbone.pretrained=false"],
        "first": [f"backbone.checkpoint={first}"],
        "moved": [f"backbone.checkpoint={moved}", "seed=1"],
        "second": [f"backbone.checkpoint={second}"],
    }
    return {kind: run_in(tmp_path, *NEW_STEM, *given).record for kind, given in kinds.items()}


def configurations(out, records) -> list[set[str]]:
    """The kinds of runs that a table would average."""
    kinds = {record["run_id"]: kind for kind, record in records.items()}
    rows = summarise(used_runs(collect(out / "runs")))
    return sorted(({kinds[run] for run in ids} for ids in rows["run_ids"]), key=min)


def as_before(record) -> str:
    """The fingerprint that the reference tables have: of everything but the weights, which differ between seeds."""
    identity = {key: value for key, value in record["features"].items() if key != "weights"}
    return content_hash(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]


@pytest.mark.slow
def test_checkpoints_are_told_apart_where_the_seed_draws_other_weights(started, tmp_path):
    """The hash of all weights cannot: the drawn ones differ between seeds, over which runs are averaged."""
    assert {kind: record["checkpoint"] for kind, record in started.items()} == {
        "scratch": None,
        "first": (hashed := file_checksum(tmp_path / "1.pt")),
        "moved": hashed,
        "second": file_checksum(tmp_path / "2.pt"),
    }
    assert configurations(tmp_path, started) == [{"first", "moved"}, {"scratch"}, {"second"}]
    runs = collect(tmp_path / "runs").set_index("run_id")
    assert runs.loc[started["scratch"]["run_id"], "features"] == as_before(started["scratch"])


@pytest.mark.slow
def test_features_of_an_adapted_network_in_two_precisions_are_told_apart(tmp_path):
    adapted = (*SMALL, "backbone=tiny", "adapt=fedavg", "adapt.training.rounds=1", "adapt.training.epochs=1")
    single, half = (run_in(tmp_path, *adapted, f"backbone.precision={p}").record for p in ("float32", "bfloat16"))
    assert single["precision"]["features"] == "float32"
    runs = collect(tmp_path / "runs").set_index("run_id")["features"]
    assert runs[single["run_id"]] == as_before(single) != runs[half["run_id"]]
