"""A search that is killed five times ends with the trials and the choice of an uninterrupted one."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

TYPED = ("method=stsa", "method.M=32", "tasks=3", "clients=2", "beta=0.5", "--trials", "40", "--study", "s")
#: After so many trials of each command it is killed, so many seconds later: within trials, between, and as it writes.
KILLS = ((1, 0.0), (5, 0.05), (3, 0.1), (8, 0.2), (6, 0.4))


def tuning(out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "fcl_bench", "tune", *TYPED, f"out={out}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def trials_of(out: Path) -> list[tuple]:
    optuna = pytest.importorskip("optuna")
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(f"{out}/studies/s.journal"))
    study = optuna.load_study(study_name="s", storage=storage)
    lost = set(study.user_attrs.get("interrupted", []))
    found = [trial for trial in study.get_trials() if trial.number not in lost]
    return [(trial.params, trial.state.name, trial.value, trial.intermediate_values) for trial in found]


@pytest.mark.slow
def test_a_killed_search_ends_as_an_uninterrupted_one(tmp_path):
    pytest.importorskip("optuna")
    printed, _ = (whole := tuning(tmp_path / "whole")).communicate()
    assert whole.returncode == 0, printed
    for trials, seconds in KILLS:
        process = tuning(tmp_path / "killed")
        assert process.stdout is not None
        left = trials
        while left:
            left -= process.stdout.readline().startswith("trial ")
        time.sleep(seconds)
        assert process.poll() is None, "it ended before it was killed: more trials, or earlier kills"
        process.kill()
        process.communicate()
    printed, _ = (last := tuning(tmp_path / "killed")).communicate()
    assert last.returncode == 0, printed
    assert "trials are there already" in printed
    expected, found = (trials_of(tmp_path / name) for name in ("whole", "killed"))
    assert len(found) == 40
    assert {state for _, state, *_ in found} == {"COMPLETE", "PRUNED"}
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine[0], mine[1], mine[2]) == (theirs[0], theirs[1], theirs[2])
    choices = [yaml.safe_load((tmp_path / name / "studies" / "s.yaml").read_text()) for name in ("whole", "killed")]
    assert choices[0] == choices[1]
