"""Which rank a process is, by torchrun's variables or Slurm's."""

from __future__ import annotations

import subprocess

import pytest

from fcl_bench.engine.remote.ranks import Rank, this_rank
from fcl_bench.errors import UserError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "1234567"}


def test_torchruns_variables_come_before_slurms():
    assert this_rank(TORCHRUN) == Rank(3, 8, 1, "node7", 29500)
    assert this_rank({**SLURM, **TORCHRUN, "SLURM_PROCID": "5"}) == Rank(3, 8, 1, "node7", 29500)


def test_slurms_variables():
    assert this_rank({**SLURM, "MASTER_ADDR": "node7"}) == Rank(3, 8, 1, "node7", 20_000 + 1234567 % 20_000)
    assert this_rank({**SLURM, "SLURM_JOB_NODELIST": "node4,node5"}).address == "node4"
    assert this_rank({**SLURM, "SLURM_JOB_NODELIST": "a", "SLURM_STEP_NODELIST": "b"}).address == "b"
    assert this_rank({**SLURM, "MASTER_ADDR": "node7", "MASTER_PORT": "1234"}).port == 1234


def test_a_list_in_brackets_is_for_scontrol_to_read(monkeypatch):
    asked = []

    def scontrol(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "gpu03\ngpu04\n", "")

    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("subprocess.run", scontrol)
    assert this_rank({**SLURM, "SLURM_JOB_NODELIST": "gpu[03-04]"}).address == "gpu03"
    assert asked == [["scontrol", "show", "hostnames", "gpu[03-04]"]]


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({}, "transport=ranks, and nothing says which rank this process is (torchrun --nproc-per-node N"),
        ({"RANK": "0"}, "transport=ranks, and nothing says which rank this process is"),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8 is no rank of WORLD_SIZE=8"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 is no number"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE=two is no number"),
        ({**TORCHRUN, "MASTER_PORT": "x"}, "MASTER_PORT=x is no number"),
        (SLURM, "transport=ranks, and nothing says where the ranks meet (export MASTER_ADDR="),
    ],
)
def test_what_makes_no_sense_is_told_in_one_line(environment, line, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError) as told:
        this_rank(environment)
    assert str(told.value).startswith(line)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["transport=ranks"], "transport=ranks, and nothing says which rank this process is (torchrun"),
        (["-m", "transport=ranks", "seed=0,1"], "-m with transport=ranks: every rank would be a sweep of its own"),
    ],
)
def test_the_command_says_what_is_missing(arguments, line, command, tmp_path, monkeypatch):
    for name in (*TORCHRUN, *SLURM):
        monkeypatch.delenv(name, raising=False)
    code, out, err = command(*arguments, f"out={tmp_path}")
    assert (code, out) == (2, "")
    assert err.startswith(f"fcl-bench: error: {line}")
    assert not list(tmp_path.iterdir())


def test_audits_are_refused_by_the_keys_that_ask_for_them(command, tmp_path, monkeypatch):
    for name, value in {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29871")
    code, _, err = command("transport=ranks", "drift=2", f"out={tmp_path}")
    assert code == 2
    assert "transport=ranks: audits need all clients' data in one process (drift=0, method.bounds=false" in err


def test_a_preview_is_rank_0s_alone(command, tmp_path, monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert command("transport=ranks", "preview=true", f"out={tmp_path}") == (0, "", "")
