"""The parent process's side of a sweep, from its start by Hydra to the last line and the exit code."""

from __future__ import annotations

import functools
import os
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fcl_bench.data.shared import stop_sharing
from fcl_bench.execution.folder import RunFolder, ignores_partition
from fcl_bench.execution.screen import ScreenConsole
from fcl_bench.files import writable
from fcl_bench.sweeps.jobs import DONE, FAILED, RUNNING, WAITING, JobReport, output_path, read_reports
from fcl_bench.sweeps.summary import end_line, failures, results_table, unmoved, varying, warnings
from fcl_bench.sweeps.workers import announce_gpus, jobs_at_once, runs_here, share_cores
from fcl_bench.tracking.console import ProgressLines, current_progress, progress, say

_POLL_SECONDS = 0.5


class Sweep:
    """One multirun, seen by its parent process.

    Attributes:
        began: whether a job composed and the sweep has its folder.
        job: number and overrides of the job that this process carries out.
        workers: the number of jobs side by side here; None if they run on other machines.
        folds: whether the output of jobs goes to files, with one line per job on the screen.
    """

    def __init__(self) -> None:
        self.began = False
        self.job: tuple[int, tuple[str, ...]] = (0, ())
        self.folder = Path()
        self.jobs: list[tuple[str, ...]] = []
        self.workers: int | None = 1
        self.folds = False
        self._beside = True  # whether jobs have processes of their own
        #: `out` and the sweep's folder as they were typed, for messages.
        self._out, self._shown = Path(), Path()
        self._screen, self._err = sys.stdout, sys.stderr
        #: Number of a job -> the end that was told of it; a cluster may start an interrupted job again.
        self._told: dict[int, str] = {}
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        self._bar: ProgressLines | tqdm[Any] = ProgressLines(0, "sweep", "run")

    def begin(self, config: Any, jobs: list[tuple[str, ...]]) -> None:
        """Take over Hydra's configuration, and prepare this machine for jobs side by side if there will be any."""
        from joblib import cpu_count

        self._shown = Path(str(config.hydra.sweep.dir))
        self.folder = self._shown.absolute()
        self._out = Path(str(config.out))
        self.jobs = jobs
        self.workers = jobs_at_once(config.hydra.launcher, len(jobs))
        self._beside = not runs_here(config.hydra.launcher)
        if self._beside and self.workers is not None:
            share_cores(self.workers, cpu_count())
            announce_gpus()
        self.folds = self._beside or (len(jobs) != 1 and not config.preview)

    def open(self) -> None:
        """Make the sweep's folder and begin to watch it. Raises a `UserError` if nothing can be written there."""
        writable(f"out={self._out}", self._shown)
        self.began = True
        if self.folds:
            self._bar = progress(len(self.jobs), "sweep", "run", at_once=True)
            self._watcher = threading.Thread(target=self._watch, name="sweep watcher", daemon=True)
            self._watcher.start()

    def reports(self) -> list[JobReport]:
        """Every job's report once the sweep has ended; jobs of other processes here that still ran have then failed."""
        found = read_reports(self.folder)
        for report in found.values():
            if report.status == RUNNING and self.workers is not None and self._beside:
                why = "its process ended without a word: killed, or out of memory"
                report.status, report.code = FAILED, 1
                report.reason = f"{why}; what it printed is in {output_path(self.folder, report.number)}"
        jobs = enumerate(self.jobs)
        waiting = [JobReport(number, list(job), WAITING) for number, job in jobs if number not in found]
        return [*found.values(), *waiting]

    def close(self) -> None:
        """Stop watching; print the results, the failures, and their paths."""
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
            self._print_news()
        if isinstance(self._bar, tqdm):
            self._bar.close()
        reports = self.reports() if self.began else []
        if len(reports) <= 1:
            return
        count = Counter(report.status for report in reports)
        left = len(reports) - count[DONE] - count[FAILED]
        more = f", {left} left (the same command goes on with them)" if left else ""
        say(f"\nsweep: {count[DONE]} done, {count[FAILED]} failed{more}", self._screen)
        self._results(reports)
        if found := warnings(reports):
            say("\n".join(["warnings:", *found]), self._screen)
        if count[FAILED]:
            output = str(self._shown / "jobs" / "{}.log") if self.folds else ""
            lines = ["failed, with the command that repeats each:", *failures(reports, output)]
            say("\n".join(lines), self._screen)
            say(f"fcl-bench: {count[FAILED]} of {len(reports)} runs failed", self._err)

    def _results(self, reports: list[JobReport]) -> None:
        """Print the table of results, and the command that makes tables and figures of exactly these runs."""
        keys = varying(report.overrides for report in reports)
        table = results_table(reports, keys)
        if table is None:
            return
        console = ScreenConsole(file=self._screen)
        console.print(table)
        done = (report for report in reports if report.status == DONE and report.run)
        moot = [report.overrides for report in done if ignores_partition(RunFolder(Path(report.run)).config())]
        if remark := unmoved(moot, keys):
            console.print(remark, soft_wrap=True, markup=False)
        out = "" if str(self._out) == "outputs" else f" --out {shlex.quote(str(self._out))}"
        say(f"runs: {self._out / 'runs'}; what each printed: {self._shown / 'jobs'}", self._screen)
        say(f"tables of these runs: fcl-tables{out} --sweep {self.folder.name}", self._screen)

    @functools.cached_property
    def _varying(self) -> set[str]:
        return varying(self.jobs)

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            self._print_news()

    def _print_news(self) -> None:
        """Print a line for each newly ended job, and progress: a bar on a terminal, else a line per minute."""
        over = {number for number, status in self._told.items() if status in (DONE, FAILED)}
        for report in read_reports(self.folder, over).values():
            if report.status in (RUNNING, self._told.get(report.number)):
                continue
            self._bar.update(report.number not in self._told)
            self._told[report.number] = report.status
            line = end_line(report, len(self.jobs), self._varying)
            with tqdm.external_write_mode(file=self._err):  # above the bar
                if report.status == FAILED:
                    say(f"fcl-bench: {line}", self._err)
                else:
                    say(line, self._screen)
        if isinstance(self._bar, ProgressLines):
            self._bar.update(0)
        else:
            self._bar.set_postfix_str(current_progress())


#: The current sweep; Hydra makes the sweeper and calls each job itself, so that they find the sweep only here.
_CURRENT: ContextVar[Sweep | None] = ContextVar("fcl_bench_sweep", default=None)


def current_sweep() -> Sweep | None:
    """The sweep of which this process is the parent; None in a worker."""
    return _CURRENT.get()


@contextmanager
def sweeping() -> Iterator[Sweep]:
    """In the block, Hydra may start a sweep; changes to the environment are undone at the end."""
    before = dict(os.environ)
    sweep = Sweep()
    token = _CURRENT.set(sweep)
    try:
        yield sweep
    finally:
        _CURRENT.reset(token)
        stop_sharing()
        try:
            sweep.close()
        finally:
            os.environ.clear()
            os.environ.update(before)
