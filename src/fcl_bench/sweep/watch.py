"""The parent's side of a sweep: from Hydra's start of it to the last line and the exit code."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback

from fcl_bench.composition import combinations
from fcl_bench.sweep.jobs import DONE, FAILED, RUNNING, WAITING, JobReport, output_path, read_reports
from fcl_bench.sweep.summary import end_line, failures, job_name, progress_line, unheard
from fcl_bench.sweep.workers import announce_gpus, jobs_at_once, runs_here, share_cores
from fcl_bench.tracking.console import say

#: Added to a multirun's arguments, so that Hydra says when the sweep starts, and with which configuration.
CALLBACK = f"+hydra.callbacks.fcl_bench_sweep._target_={__name__}.Begin"
_POLL_SECONDS = 0.5


class Begin(Callback):
    """Hands Hydra's configuration of the sweep to the `Sweep` that the command is in."""

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        sweep = _CURRENT.get()
        if sweep is not None:
            sweep.begin(config)


class Sweep:
    """One multirun, as its parent process sees it.

    Attributes:
        began: whether Hydra got as far as starting it.
        jobs: the overrides of each job; None where the sweeper decides them as it goes.
        workers: jobs side by side here; None if they run on other machines.
    """

    def __init__(self) -> None:
        self.began = False
        self.folder = Path()
        self.jobs: list[tuple[str, ...]] | None = None
        self.workers: int | None = 1
        self._told: set[int] = set()
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def total(self) -> int | None:
        """Number of jobs, None if not known."""
        return None if self.jobs is None else len(self.jobs)

    def begin(self, config: Any) -> None:
        """Learn what is to be done, and get this machine ready for jobs side by side if there will be any."""
        from joblib import cpu_count

        self.folder = Path(str(config.hydra.sweep.dir)).absolute()
        self.jobs = _jobs(config)
        self.workers = jobs_at_once(config.hydra.launcher, self.total)
        if not runs_here(config.hydra.launcher):
            if self.workers is not None:
                share_cores(self.workers, cpu_count())
                announce_gpus()
            self._watcher = threading.Thread(target=self._watch, name="sweep watcher", daemon=True)
            self._watcher.start()
        self.began = True

    def header(self, number: int) -> str:
        """The line before a job that runs in this process."""
        reports = [report for report in read_reports(self.folder).values() if report.number != number]
        so_far = f" ({progress_line(reports, self.total, 1)})" if reports else ""
        return job_name(number, self.total) + so_far

    def reports(self) -> list[JobReport]:
        """Every job's report once the sweep has ended; what was still at work on this machine has then failed."""
        found = read_reports(self.folder)
        for report in found.values():
            if report.status == RUNNING and self.workers is not None:
                why = "its process ended without a word: killed, or out of memory"
                report.status, report.code = FAILED, 1
                report.reason = f"{why}; what it printed is in {output_path(self.folder, report.number)}"
        jobs = enumerate(self.jobs or [])
        waiting = [JobReport(number, list(job), WAITING) for number, job in jobs if number not in found]
        return [*found.values(), *waiting]

    def close(self) -> None:
        """Stop watching, and say what failed."""
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
            self._tell()
        reports = self.reports() if self.began else []
        if len(reports) <= 1:
            return
        count = Counter(report.status for report in reports)
        left = len(reports) - count[DONE] - count[FAILED]
        more = f", {left} left (the same command goes on with them)" if left else ""
        say(f"\nsweep: {count[DONE]} done, {count[FAILED]} failed{more}")
        if self.workers is None and count[RUNNING]:
            # Whether they still are at work, only the cluster knows: a job that was cancelled says no last word.
            say("\n".join(["begun on other machines, without a word of their end:", *unheard(reports)]))
        if count[FAILED]:
            say("\n".join(["failed, with the command that repeats each:", *failures(reports)]))
            print(f"fcl-bench: {count[FAILED]} of {len(reports)} runs failed", file=sys.stderr)

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            self._tell()

    def _tell(self) -> None:
        """A line for each job that has ended since; on a terminal, a line that moves."""
        reports = list(read_reports(self.folder).values())
        live = sys.stderr.isatty()
        status = progress_line(reports, self.total, self.workers or max(1, len(reports)))
        if live:
            print("\r\x1b[K", end="", file=sys.stderr)
        for report in reports:
            if report.status == RUNNING:
                self._told.discard(report.number)  # a cluster has started an interrupted one again
            if report.number in self._told or report.status == RUNNING:
                continue
            self._told.add(report.number)
            say(end_line(report, self.total, elsewhere=self.workers is None) + ("" if live else f"  [{status}]"))
            if report.status == FAILED:
                print(f"fcl-bench: run {report.number + 1} failed: {report.reason}", file=sys.stderr, flush=True)
        if live and not self._stop.is_set():
            print(f"sweep: {status}", end="", file=sys.stderr, flush=True)


#: Hydra makes its callbacks itself, from the configuration: nothing but this can lead them to the sweep.
_CURRENT: ContextVar[Sweep | None] = ContextVar("fcl_bench_sweep", default=None)


def current_sweep() -> Sweep | None:
    """The sweep that this process is the parent of; None in a worker."""
    return _CURRENT.get()


@contextmanager
def sweeping() -> Iterator[Sweep]:
    """A block in which Hydra may start a sweep; what it changes in the environment is undone at the end."""
    before = dict(os.environ)
    sweep = Sweep()
    token = _CURRENT.set(sweep)
    try:
        yield sweep
    finally:
        _CURRENT.reset(token)
        try:
            sweep.close()
        finally:
            os.environ.clear()
            os.environ.update(before)


def _jobs(config: Any) -> list[tuple[str, ...]] | None:
    """The overrides of each job, as Hydra's own sweeper makes them; None for another sweeper."""
    if not str(config.hydra.sweeper._target_).endswith(".BasicSweeper"):
        return None
    fixed = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    return combinations([*fixed, *config.hydra.overrides.task])
