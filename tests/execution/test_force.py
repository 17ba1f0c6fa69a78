"""What `force=true` does about a run that was interrupted."""

from __future__ import annotations

import pytest

from fcl_bench.engine import loop as engine
from tests.small_runs import interrupted_in, run_in

SMALL = ("method=afl", "data=digits", "tasks=4", "clients=2")


@pytest.mark.slow_cases("7-0-0", "7-1-2")
@pytest.mark.parametrize(("job", "restarts", "first"), [("7", "1", 2), ("7", "0", 0), ("8", "1", 0)])
def test_a_forced_run_goes_on_only_where_its_own_job_is_queued_again(tmp_path, monkeypatch, job, restarts, first):
    """It started anew each time that Slurm queued the job again, so that a run beyond the time limit never ended."""
    run_in(tmp_path, *SMALL)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with interrupted_in(2, monkeypatch):
        run_in(tmp_path, *SMALL, "force=true")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    learnt = []
    learn = engine.Federation._learn
    monkeypatch.setattr(engine.Federation, "_learn", lambda self, task: learnt.append(task.index) or learn(self, task))
    assert not run_in(tmp_path, *SMALL, "force=true").was_complete
    assert learnt == list(range(first, 4))
