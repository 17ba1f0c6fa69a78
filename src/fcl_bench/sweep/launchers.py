"""What differs between Hydra's launchers: where jobs run, and how many at once."""

from __future__ import annotations

from typing import Any


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
