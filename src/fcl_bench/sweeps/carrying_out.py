"""Carries out the jobs of a sweep: one after the other in this process, or by one of Hydra's launchers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from omegaconf import DictConfig

from fcl_bench.composition import composed
from fcl_bench.sweeps.watch import current_sweep
from fcl_bench.sweeps.workers import runs_here

#: Jobs that a launcher gets at once: it keeps 200 KB for each until all of them have ended.
_AT_ONCE = 1000


def _uncomposed(sweep: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The sweep's own configuration with the overrides of a job, which composes itself from them."""
    job = copy.deepcopy(sweep)
    job.hydra.overrides.task = list(overrides)
    return job


def carry_out_jobs(jobs: Sequence[tuple[str, ...]], config: Any, context: Any, function: Any) -> None:
    """Carry out every job; each composes itself when its turn comes, and fails if it cannot.

    Raises:
        HydraException, OmegaConfBaseException: no job composes; it is the first one's.
    """
    sweep = current_sweep()
    assert sweep is not None
    setup_globals()
    sweep.begin(config, list(jobs))
    errors: list[Exception] = []
    for overrides in jobs:
        try:
            composed(overrides)
            break
        except Exception as error:  # the job itself reports it, if there is another
            errors.append(error)
    else:
        raise errors[0]
    sweep.open()
    if runs_here(config.hydra.launcher):
        HydraConfig.instance().set_config(config)  # for keys that refer to it
        for sweep.job in enumerate(jobs):
            function(config)
        return
    context = copy.copy(context)
    context.config_loader = copy.copy(context.config_loader)
    context.config_loader.load_sweep_config = _uncomposed
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=function, config=config)
    for begin in range(0, len(jobs), _AT_ONCE):
        for done in launcher.launch(jobs[begin : begin + _AT_ONCE], initial_job_idx=begin):
            _ = done.return_value  # raises what ended the job
