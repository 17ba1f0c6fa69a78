"""Old names stay as aliases: for the command, Python, sweeps and `show`, with one line of notice."""

from __future__ import annotations

import pytest

import fcl_bench
from fcl_bench.composition import RENAMED, choices_of, current

SMALL = ("data=digits", "backbone=tiny", "backbone.width=2", "tasks=1", "clients=2", "partition=iid")
SHORT = (*SMALL, "method.training.rounds=1", "method.training.epochs=1")


@pytest.mark.parametrize(
    ("typed", "means"),
    [
        ("method=finetune", "method=fedavg"),
        ("method=joint", "method=centralised_ridge"),
        ("method=joint_training", "method=centralised"),
        ("method=finetune,stsa,joint", "method=fedavg,stsa,centralised_ridge"),
        ("method=choice(stsa,finetune)", "method=choice(stsa,fedavg)"),
        ("method.merge=joint", "method.merge=joint"),
        ("-m", "-m"),
        ("--multirun", "--multirun"),
    ],
)
def test_what_is_typed_with_an_old_name_becomes_todays(typed, means, caplog):
    assert current([typed]) == [means]
    assert [record.getMessage() for record in caplog.records] == [f"{typed} is now {means}"] * (typed != means)


def test_every_alias_leads_to_a_name_that_is_there_and_hides_none():
    names = choices_of("method")
    assert set(RENAMED.values()) <= set(names)
    assert not set(RENAMED) & set(names)


@pytest.mark.slow
def test_fedavg_runs_under_its_name_and_the_old_one_is_the_same_run(command, tmp_path, caplog):
    code, out, _ = command("method=fedavg", *SHORT, f"out={tmp_path}")
    assert code == 0
    assert "fedavg" in out
    again = fcl_bench.run("finetune", overrides=SHORT, out=str(tmp_path))
    assert again.record["method"] == "fedavg"
    assert len(list((tmp_path / "runs").glob("fedavg-*"))) == 1
    assert "method=finetune is now method=fedavg" in caplog.text


@pytest.mark.slow
def test_a_sweep_and_show_know_old_names(command, tmp_path):
    small = ("data=digits", "tasks=1", "clients=2", "method.M=16", f"out={tmp_path}")
    assert command("-m", "method=joint,afl", *small)[0] == 0
    assert len(list((tmp_path / "runs").glob("centralised_ridge-*"))) == 1
    assert command("show", "method=finetune")[1].startswith("method=fedavg\n")
    assert "method=fedavg\n" in command("method=finetune", "--help")[1]


def test_a_near_miss_is_suggested_and_an_old_name_is_not(command):
    err = command("method=FedAvg")[2]
    assert "did you mean fedavg?" in err
    assert "finetune" not in err
