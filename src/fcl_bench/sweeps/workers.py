"""Decides how many jobs run side by side and how they share one machine: cores are divided, GPUs are assigned."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fcl_bench.environment import SPIN

#: The variable in which the parent lists the machine's GPUs for the workers, in the form of CUDA_VISIBLE_DEVICES.
_GPUS = "FCL_BENCH_GPUS"


def jobs_at_once(launcher: Any, jobs: int | None) -> int | None:
    """How many jobs the launcher runs side by side on this machine; None if they run elsewhere.

    Args:
        jobs: the number of jobs of the sweep, None if not known beforehand.
    """
    from joblib import cpu_count, effective_n_jobs

    match _kind(launcher):
        case "BasicLauncher":
            return 1
        case "JoblibLauncher":
            workers = effective_n_jobs(launcher.n_jobs)
            return min(workers, jobs or workers)
        case "LocalLauncher":  # submitit's local launcher starts all of them
            return jobs or cpu_count()
    return None


def runs_here(launcher: Any) -> bool:
    """Whether the launcher runs its jobs one by one in the parent process. Call it in that process."""
    return _kind(launcher) in ("BasicLauncher", "JoblibLauncher") and jobs_at_once(launcher, None) == 1


def _kind(launcher: Any) -> str:
    return str(launcher._target_).rpartition(".")[2]


def share_cores(workers: int, cores: int) -> None:
    """Have the processes that this one starts use `cores / workers` threads each, and wait without spinning.

    Call this before they start, since OpenMP reads its settings when torch is imported. The user's settings are kept.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        if os.environ.get("GOMP_SPINCOUNT") == SPIN:
            del os.environ["GOMP_SPINCOUNT"]  # it would override the policy


def announce_gpus() -> None:
    """Tell the workers which GPUs they share. They cannot look, since submitit's local executor hides the GPUs."""
    if gpus := visible_gpus():
        os.environ.setdefault(_GPUS, ",".join(gpus))


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, without importing torch."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []  # without a driver there is no GPU
    count = sum(line.startswith("GPU") for line in found.stdout.splitlines())
    return [str(index) for index in range(count)]


def take_gpu(sweep: Path, device: str) -> None:
    """Let this worker see only one of the announced GPUs, the same for all of its jobs.

    Workers take places 0, 1, 2, ..., which are free again when they end; place i has GPU i modulo the number of GPUs,
    so that no GPU has two jobs while another has none. Call this before torch is imported. If the user asks for a GPU
    by its number (device=cuda:1), nothing is changed.
    """
    gpus = [name for name in os.environ.get(_GPUS, "").split(",") if name]
    if gpus and device in ("auto", "cuda"):
        place, _ = _place(sweep)
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]


@functools.cache
def _place(sweep: Path) -> tuple[int, FileLock]:
    """This process's place in the sweep, taken at the first call, and its lock, held until the process ends."""
    folder = sweep / "workers"
    folder.mkdir(parents=True, exist_ok=True)
    place = 0
    while True:
        lock = FileLock(folder / f"{place}.lock")
        try:
            lock.acquire(timeout=0)
            return place, lock
        except Timeout:
            place += 1
