"""How jobs that run side by side share one machine: cores divided, GPUs handed out one by one."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

from filelock import FileLock, Timeout

#: GNU OpenMP's limit on spinning that the command sets for a run alone; see `fcl_bench.cli.app.main`.
SPIN = "1000"
#: What the parent tells the workers: the machine's GPUs, as CUDA_VISIBLE_DEVICES lists them.
_GPUS = "FCL_BENCH_GPUS"


def share_cores(workers: int, cores: int) -> None:
    """Have the processes that this one starts use `cores / workers` threads each, and wait without spinning.

    To be called before they start: OpenMP reads its settings when torch is imported. What the user has set stays.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        if os.environ.get("GOMP_SPINCOUNT") == SPIN:
            del os.environ["GOMP_SPINCOUNT"]  # it would win over the policy


def announce_gpus() -> None:
    """Tell the workers which GPUs there are to share. submitit's local executor hides them, so they cannot look."""
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
        return []  # no driver, no GPU
    return [str(index) for index, _ in enumerate(line for line in found.stdout.splitlines() if line.startswith("GPU"))]


def take_gpu(sweep: Path, device: str) -> None:
    """Let this worker see one of the announced GPUs only, the same for all of its jobs.

    Workers take places 0, 1, 2, ... that their death frees; place i has GPU i modulo their number, so that no GPU has
    two jobs while another has none. To be called before torch is imported. A GPU that was asked for by its number
    (device=cuda:1) is left to the user.
    """
    gpus = [name for name in os.environ.get(_GPUS, "").split(",") if name]
    if gpus and device in ("auto", "cuda"):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[_place(sweep).index % len(gpus)]


class _Place:
    """A worker's place in a sweep, held by a lock for as long as its process lives."""

    def __init__(self, sweep: Path) -> None:
        folder = sweep / "workers"
        folder.mkdir(parents=True, exist_ok=True)
        self.index = 0
        while True:
            self._lock = FileLock(folder / f"{self.index}.lock")
            try:
                self._lock.acquire(timeout=0)
                return
            except Timeout:
                self.index += 1


@functools.cache
def _place(sweep: Path) -> _Place:
    """This process's place, taken at the first call."""
    return _Place(sweep)
