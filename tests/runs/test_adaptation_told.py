"""What a first stage tells of single samples and costs beside raw images; and first stages of an earlier version."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from fcl_bench.engine import checkpoint
from fcl_bench.engine.checkpoint import SILENT, Checkpoint
from fcl_bench.results.collect import collect
from fcl_bench.runs.adapt import adapt
from fcl_bench.runs.inputs import load_images
from tests.runs.adaptation_runs import SMALL, STSA, plan_of
from tests.small_runs import run_in

pytestmark = pytest.mark.usefixtures("no_pictures")

#: A sample of every client's is alone: as many clients as a small class has samples.
PILORA = (
    *("data=digits", "backbone=tiny", "backbone.architecture=vit", "backbone.width=4", "tasks=2", "clients=12"),
    *(
        "beta=0.3",
        "partition.min_size=0",
        "adapt=pilora",
        "adapt.training.rounds=2",
        "adapt.training.epochs=1",
        "method=fedncm",
    ),
)


def made_older(place: Path, patch: pytest.MonkeyPatch) -> None:
    """As the last version wrote it that did not count what is revealed."""
    kept = Checkpoint(place, 1)
    state, tensors = kept.load()
    del state["ledger"]["raw"]
    del tensors["rows.told"]
    tensors["rows.uploads"] = tensors["rows.uploads"][:, :54].contiguous()
    for file in place.iterdir():
        file.unlink()
    with patch.context() as inside:
        inside.setattr(checkpoint, "FORMAT", SILENT)
        wrote = ("schema", "format", "tensors", "tensors_checksum", "row_files", "checksum")
        Checkpoint(place, 1).save({name: value for name, value in state.items() if name not in wrote}, tensors)
    assert json.loads((place / "state.json").read_text())["format"] == SILENT


def test_fedavgs_of_an_earlier_version_is_taken_over_and_others_are_made_anew(tmp_path, monkeypatch):
    """FedAvg told nothing; of PILoRA's nobody knows."""
    for name, choice, hit in (("fedavg", STSA, True), ("pilora", PILORA, False)):
        plan = plan_of(tmp_path, *choice)
        first = run_in(tmp_path, *choice).record["adaptation"]
        [place] = [path for path in (tmp_path / "cache").glob("adapted-*") if path.is_dir()]
        made_older(place, monkeypatch)
        again = adapt(plan, none if hit else partial(load_images, plan), tmp_path / "cache")
        assert again.hit is hit, name
        record = again.record(first["weights"])
        assert record["up_total_bytes"] == first["up_total_bytes"]
        assert record["told"] == first["told"]
        assert record["raw"] == (None if hit else first["raw"])
        for file in [*place.iterdir(), place]:
            file.unlink() if file.is_file() else file.rmdir()


def none():
    pytest.fail("there is nothing to train")


def test_the_first_stage_says_its_own(tmp_path):
    outcome = run_in(tmp_path, *PILORA)
    own, stage = outcome.record["privacy"], outcome.record["adaptation"]
    assert stage["told"]["told_samples"] > 0
    assert stage["told"]["one_sample_sums"] == 2 * stage["told"]["told_samples"]  # in each of two rounds
    assert own["one_sample_sums"] == own["told_samples"] > stage["told"]["told_samples"]  # of both tasks
    # 8 x 8 images of the first task, three bytes per pixel.
    assert (stage["raw"]["kind"], stage["raw"]["sample_bytes"]) == ("images", 3 * 8 * 8 + 4)
    assert stage["raw"]["total_bytes"] % 196 == 0
    assert 0 < stage["raw"]["larger"] < stage["raw"]["uploads"] == 12
    assert outcome.record["communication"]["raw"]["kind"] == "features"
    again = run_in(tmp_path, *PILORA, "method=stsa", "method.M=32").record["adaptation"]
    assert again["cache_hit"]
    assert (again["told"], again["raw"]) == (stage["told"], stage["raw"])


def test_tables_have_what_runs_told(tmp_path):
    record = run_in(tmp_path, "method=fedncm", *SMALL[:3], "tasks=2", "clients=30", "partition.min_size=0").record
    run_in(tmp_path, "method=joint", "method.M=16", "tasks=2", "clients=3")
    rows = collect(tmp_path / "runs").set_index("method")
    raw, privacy = record["communication"]["raw"], record["privacy"]
    assert rows.loc["fedncm", "raw_mib"] == raw["busiest_bytes"] / 2**20
    assert rows.loc["fedncm", "times_raw"] == record["communication"]["up_total_bytes"] / raw["total_bytes"]
    assert rows.loc["fedncm", "one_sample_sums"] == privacy["one_sample_sums"] > 0
    assert rows.loc["fedncm", "told_percent"] == 100 * privacy["told_samples"] / record["labels"]["samples"] < 100
    assert (rows.loc["joint", "times_raw"], rows.loc["joint", "told_percent"]) == (1, 100)
