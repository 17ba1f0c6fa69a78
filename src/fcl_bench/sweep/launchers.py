"""What differs between Hydra's launchers: where jobs run, how many at once, and what has to be installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from fcl_bench.errors import UserError

_JOBLIB, _SUBMITIT = "hydra_plugins.hydra_joblib_launcher", "hydra_plugins.hydra_submitit_launcher"
#: Choices of hydra/launcher that need a plugin, and its module: ours, and the plugins' own.
_PLUGINS = {
    **dict.fromkeys(("parallel", "joblib"), _JOBLIB),
    **dict.fromkeys(("processes", "slurm", "submitit_local", "submitit_slurm"), _SUBMITIT),
}
_GROUP = "hydra/launcher"


def require_launcher(arguments: list[str]) -> None:
    """Raise a `UserError` if the launcher that `arguments` choose is not installed."""
    for argument in arguments:
        key, _, choice = argument.partition("=")
        if key == _GROUP and choice in _PLUGINS and not _installed(_PLUGINS[choice]):
            raise UserError(f"{argument}: its launcher is not installed", "pip install 'fcl-bench[sweep]'")


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # no plugin at all: its parent package is missing
        return False


def jobs_at_once(launcher: Any, jobs: int | None) -> int | None:
    """How many jobs the launcher runs side by side on this machine; None if they run elsewhere.

    Args:
        launcher: `hydra.launcher` of the configuration.
        jobs: of the sweep, None if not known beforehand.
    """
    from joblib import cpu_count, effective_n_jobs

    match _kind(launcher):
        case "BasicLauncher":
            return 1
        case "JoblibLauncher":
            workers = effective_n_jobs(launcher.n_jobs)
            return min(workers, jobs or workers)
        case "LocalLauncher":  # submitit's, which starts all of them
            return jobs or cpu_count()
    return None


def runs_here(launcher: Any) -> bool:
    """Whether the launcher runs its jobs one after the other in the parent process. To be asked there."""
    return _kind(launcher) in ("BasicLauncher", "JoblibLauncher") and jobs_at_once(launcher, None) == 1


def _kind(launcher: Any) -> str:
    return str(launcher._target_).rpartition(".")[2]
