"""Carries out the jobs of a sweep: one after the other in this process, or by one of Hydra's launchers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import run_job, setup_globals
from hydra.errors import HydraException
from omegaconf import open_dict
from omegaconf.errors import OmegaConfBaseException

from fcl_bench.sweeps.watch import Sweep, current_sweep
from fcl_bench.sweeps.workers import runs_here

#: What composing a job raises for a key or a choice that is not there.
_NOT_COMPOSED = (HydraException, OmegaConfBaseException)


def carry_out_jobs(jobs: Sequence[tuple[str, ...]], config: Any, context: Any, function: Any) -> None:
    """Carry out every job that composes, and report the others as failed.

    Raises:
        HydraException, OmegaConfBaseException: no job composes; it is the first one's.
    """
    sweep = current_sweep()
    assert sweep is not None
    sweep.begin(config, list(jobs))
    if runs_here(config.hydra.launcher):
        _one_by_one(sweep, config, context, function)
    else:
        _launched(sweep, config, context, function)


def _one_by_one(sweep: Sweep, config: Any, context: Any, function: Any) -> None:
    """Compose each job when its turn comes, once: composing takes a fifth of a default run on digits."""
    setup_globals()
    refused: list[tuple[int, Exception]] = []
    for number, overrides in enumerate(sweep.jobs):
        try:
            job = context.config_loader.load_sweep_config(config, list(overrides))
        except _NOT_COMPOSED as error:
            refused.append((number, error))
            continue
        if not sweep.began:
            sweep.open()
        while refused:
            sweep.refuse(*refused.pop(0))
        with open_dict(job):
            job.hydra.job.id = job.hydra.job.num = number
        done = run_job(function, job, "hydra.sweep.dir", "hydra.sweep.subdir", context)
        _ = done.return_value  # raises what ended the job
    if len(refused) == len(sweep.jobs):
        raise refused[0][1]
    for number, raised in refused:
        sweep.refuse(number, raised)


def _launched(sweep: Sweep, config: Any, context: Any, function: Any) -> None:
    """Compose all jobs first, since workers end at the first that does not compose; those go behind the others."""
    good: list[tuple[str, ...]] = []
    refused: list[tuple[tuple[str, ...], Exception]] = []
    for overrides in sweep.jobs:
        try:
            context.config_loader.load_sweep_config(config, list(overrides))
        except _NOT_COMPOSED as error:
            refused.append((overrides, error))
        else:
            good.append(overrides)
    if not good:
        raise refused[0][1]
    sweep.open()
    # Launchers number their jobs without a gap.
    sweep.jobs = [*good, *(overrides for overrides, _ in refused)]
    for number, (_, raised) in enumerate(refused, start=len(good)):
        sweep.refuse(number, raised)
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=function, config=config)
    for done in launcher.launch(good, initial_job_idx=0):
        _ = done.return_value
