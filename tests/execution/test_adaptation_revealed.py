"""What a first stage tells of single samples and costs beside raw images."""

from __future__ import annotations

import pytest

from fcl_bench.results.collect import collect
from tests.execution.adaptation_runs import SMALL
from tests.small_runs import run_in

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


@pytest.mark.slow
def test_the_first_stage_says_its_own(tmp_path):
    outcome = run_in(tmp_path, *PILORA)
    own, stage = outcome.record["privacy"], outcome.record["adaptation"]
    assert stage["revealed"]["revealed_samples"] > 0
    assert stage["revealed"]["one_sample_sums"] == 2 * stage["revealed"]["revealed_samples"]  # in each of two rounds
    assert own["one_sample_sums"] == own["revealed_samples"] > stage["revealed"]["revealed_samples"]  # of both tasks
    # 8 x 8 images of the first task, three bytes per pixel.
    assert (stage["raw"]["kind"], stage["raw"]["sample_bytes"]) == ("images", 3 * 8 * 8 + 4)
    assert stage["raw"]["total_bytes"] % 196 == 0
    assert 0 < stage["raw"]["larger"] < stage["raw"]["uploads"] == 12
    assert outcome.record["communication"]["raw"]["kind"] == "features"
    again = run_in(tmp_path, *PILORA, "method=stsa", "method.M=32").record["adaptation"]
    assert again["cache_hit"]
    assert (again["revealed"], again["raw"]) == (stage["revealed"], stage["raw"])


@pytest.mark.slow
def test_tables_have_what_runs_told(tmp_path):
    record = run_in(tmp_path, "method=fedncm", *SMALL[:3], "tasks=2", "clients=30", "partition.min_size=0").record
    run_in(tmp_path, "method=centralised_ridge", "method.M=16", "tasks=2", "clients=3")
    rows = collect(tmp_path / "runs").set_index("method")
    raw, privacy = record["communication"]["raw"], record["privacy"]
    assert rows.loc["fedncm", "raw_mib"] == raw["busiest_bytes"] / 2**20
    assert rows.loc["fedncm", "times_raw"] == record["communication"]["up_total_bytes"] / raw["total_bytes"]
    assert rows.loc["fedncm", "one_sample_sums"] == privacy["one_sample_sums"] > 0
    assert (
        rows.loc["fedncm", "revealed_percent"] == 100 * privacy["revealed_samples"] / record["labels"]["samples"] < 100
    )
    assert (rows.loc["centralised_ridge", "times_raw"], rows.loc["centralised_ridge", "revealed_percent"]) == (1, 100)
