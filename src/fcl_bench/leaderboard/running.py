"""Carries out a track: every run that has no row yet, and a search for every method, on several processes."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from joblib.externals.loky import ProcessPoolExecutor
from joblib.externals.loky.process_executor import TerminatedWorkerError

from fcl_bench.cli import tune
from fcl_bench.cli.overrides import without_folders
from fcl_bench.composition import NAMED_BY
from fcl_bench.config import text
from fcl_bench.data.shared import start_sharing
from fcl_bench.environment import available_cores
from fcl_bench.errors import UserError, first_line
from fcl_bench.execution.run import run
from fcl_bench.leaderboard.store import Store, right_of, row_of
from fcl_bench.leaderboard.track import DEFAULTS, TUNED, Track, fingerprint_of, request_of, settings_of, shared_of
from fcl_bench.sweeps.search import RULES
from fcl_bench.sweeps.workers import share_cores
from fcl_bench.tracking import flat
from fcl_bench.tracking.console import duration, printed_to, say


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        method, kind, request, setting, seed: which row it is, see `store.Store`.
        overrides: what one would type for it, without `out`.
    """

    method: str
    kind: str
    request: str
    setting: Mapping[str, str]
    seed: int
    overrides: list[str]


def begin(folders: list[str]) -> None:
    """Prepare a worker: it searches the user's folders of YAML files, and leaves Ctrl-C to its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    without_folders(folders)
    start_sharing()


def do(job: Job, out: Path) -> dict[str, Any]:
    """Carry out a run, or read it if it is there; return its row, with its answers and the data's fingerprint.

    These are `right`, see `answers.right_of`, and `data`.
    """
    with printed_to(out / "logs" / f"{job.method}.log"):
        outcome = run(settings_of([*job.overrides, f"seed={job.seed}", f"out={out}"]))
    who = {"method": job.method, "kind": job.kind, "request": job.request, **job.setting, "seed": job.seed}
    found = row_of(outcome.record, outcome.folder / "uploads.csv")
    right = right_of(outcome.folder, found["A_T"])
    return {**who, **found, "right": right, "data": outcome.record["data_fingerprint"]}


def search(job: Job, out: Path, trials: int) -> dict[str, str]:
    """Search a method's declared knobs on validation samples, or go on with it; return the chosen ones as typed.

    Args:
        job: a run in the setting of the search.
        out: the folder of the trials' runs and of the study.
        trials: how many in all.
    """
    name = f"leaderboard-{job.method}-{job.request}-{RULES}"
    with printed_to(out / "logs" / f"{job.method}.log"):
        try:
            tune.work([*job.overrides, f"out={out}", "--trials", str(trials), "--study", name])
        except UserError as error:
            if "nothing to search" in str(error):
                return {}
            raise
    choice = yaml.safe_load((out / "studies" / f"{name}.yaml").read_text())
    return {key: text(value) or "null" for key, value in flat(choice, separator=".").items()}


#: How many of the methods that take longest are named.
_LISTED = 5


class Running:
    """Fills a track's rows.

    Args:
        track: what is run.
        store: the rows that are there; it is saved after every run.
        out: where runs, studies and logs are kept.
        trials: of every method's search; 0: no search, and no tuned rows.
        workers: the number of processes.

    Attributes:
        refused, failed: method -> why its work ended, in words that the track's user can act on, or by a bug.
    """

    def __init__(self, track: Track, store: Store, out: Path, trials: int, workers: int) -> None:
        self._track, self._store, self._out = track, store, out
        self._trials, self._workers = trials, workers
        self._requests: dict[str, str] = {}
        self._has_data = False
        self.refused: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def carry_out(self, methods: Sequence[str], retried: Iterable[str] = ()) -> None:
        """Do all that is left of `methods`, first their defaults, then their searches and tuned runs.

        Args:
            methods: names of methods.
            retried: those that are tried again although they were refused before.
        """
        for method in retried:
            self._store.about["not_run"].pop(method, None)
        methods = [method for method in methods if self._allows(method)]
        if methods:
            self._require_same_problem(methods[0])
        share_cores(self._workers, available_cores())
        pool = ProcessPoolExecutor(self._workers, initializer=begin, initargs=(NAMED_BY,))
        try:
            # One run of each method tells how long the others take.
            self._carry_out(pool, [self._runs(method, DEFAULTS)[:1] for method in methods if not self._seconds(method)])
            methods = sorted((method for method in methods if self._seconds(method)), key=self._seconds)
            if not methods and self.refused:
                method, why = next(iter(self.refused.items()))
                raise UserError(f"the track {self._track.name} refuses every method, {method} since {why}", "--methods")
            self._announce(methods)
            self._carry_out(pool, [self._runs(method, DEFAULTS) for method in methods])
            if self._trials:
                self._search(pool, methods)
                done = [method for method in methods if self._is_tuned(method)]
                self._carry_out(pool, [self._runs(method, TUNED) for method in done if self._store.tuned(method)])
        except TerminatedWorkerError as error:
            remedy = "the same command with fewer --workers: memory may be short"
            raise UserError("a worker process was killed", remedy) from error
        finally:
            # What a worker was doing goes on from its checkpoint the next time.
            pool.shutdown(wait=False, kill_workers=True)
            self._save()

    def _allows(self, method: str) -> bool:
        """Whether the track has a row for a method, as far as its configuration tells; notes why not."""
        about = self._store.about
        try:
            settings = settings_of([*self._track.overrides(method, {}, self._track.settings[0]), "seed=0"])
        except UserError as error:
            self.refused[method] = about["not_run"][method] = str(error)
            return False
        request = request_of(settings)
        if twin := next((other for other, own in self._requests.items() if own == request), None):
            about["not_run"][method] = f"its run is that of {twin}"
            return False
        self._requests[method] = request
        self._store.keep(method, DEFAULTS, request)
        return method not in about["not_run"]

    def _require_same_problem(self, method: str) -> None:
        """Note what all rows share in each setting; raise a `UserError` if the rows that are there share other things.

        Args:
            method: any one that the track allows.
        """
        first = (self._track.overrides(method, {}, setting) for setting in self._track.settings)
        shared = [shared_of(settings_of([*typed, "seed=0"])) for typed in first]
        known = self._store.about.setdefault("shared", shared)
        for ours, theirs in zip(shared, known, strict=False):
            if other := [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]:
                key = other[0]
                what = f"{key}={ours.get(key)}, and the rows that are there have {key}={theirs.get(key)}"
                raise UserError(what, "a track of your own with this key, under another name")

    def _require_data(self, jobs: Sequence[Job]) -> None:
        """Look at the data once, before anything runs: no method is to blame for a file that is missing or another."""
        if jobs and not self._has_data:
            self._store.require_data(fingerprint_of(jobs[0].overrides))
            self._has_data = True

    def _runs(self, method: str, kind: str) -> list[Job]:
        """The runs of a method that have no row yet."""
        knobs = self._store.tuned(method) if kind == TUNED else {}
        request = self._requests[method]
        if knobs:
            typed = self._track.overrides(method, knobs, self._track.settings[0])
            request = request_of(settings_of([*typed, "seed=0"]))
            self._store.keep(method, kind, request)
        return [
            Job(method, kind, request, setting, seed, self._track.overrides(method, knobs, setting))
            for setting in self._track.settings
            for seed in self._track.seeds
            if self._store.row(method, kind, request, setting, seed) is None
        ]

    def _seconds(self, method: str) -> float:
        """The mean time of a method's runs that are there; 0 where none is."""
        request = self._requests[method]
        known = [row["total_seconds"] for row in self._store.rows if row["request"] == request]
        return statistics.fmean(known) if known else 0.0

    def _is_tuned(self, method: str) -> bool:
        """Whether the search is there, of these defaults, by the same rules and with as many trials."""
        known = self._store.about["tuned"].get(method, {})
        wanted = {"request": self._requests[method], "trials": self._trials, "rules": RULES}
        return all(known.get(key) == value for key, value in wanted.items())

    def _left(self, method: str, kind: str) -> float:
        """About how many seconds the rest of a method's rows takes, on one process."""
        count = len(self._track.settings) * len(self._track.seeds)
        if kind == DEFAULTS:
            runs = len(self._runs(method, kind))
        elif self._is_tuned(method):
            runs = len(self._runs(method, kind)) if self._store.tuned(method) else 0
        else:
            runs = self._trials + count
        return runs * self._seconds(method)

    def _announce(self, methods: Sequence[str]) -> None:
        """Say how long all of it takes, before most of it begins."""
        kinds = [DEFAULTS, TUNED][: 2 if self._trials else 1]
        left = {method: sum(self._left(method, kind) for kind in kinds) for method in methods}
        longest = sorted((method for method in left if left[method]), key=lambda method: -left[method])[:_LISTED]
        if longest:
            each = ", ".join(f"{method} {duration(left[method])}" for method in longest)
            total = duration(sum(left.values()) / self._workers)
            say(f"what is left takes about {total} (--workers {self._workers}); the longest alone: {each}")

    def _carry_out(self, pool: Any, groups: Iterable[list[Job]]) -> None:
        """Do the runs of every group, and put them among the rows."""
        groups = list(groups)
        self._require_data([job for jobs in groups for job in jobs])
        work = {pool.submit(do, job, self._out): job for jobs in groups for job in jobs}

        def ended(job: Job, row: dict[str, Any]) -> None:
            self._store.require_data(row.pop("data"))
            self._store.answers.put(row["run_id"], row.pop("right"))
            self._store.put(row)
            setting = " ".join(f"{key}={value}" for key, value in job.setting.items())
            result = f"A_T {row['A_T']:.2f}, {row['total_seconds']:.0f} s"
            say(f"{job.method} ({job.kind}) {setting} seed={job.seed}: {result}")

        self._wait(work, ended)

    def _search(self, pool: Any, methods: Iterable[str]) -> None:
        """Search the knobs of the methods that have not been searched."""
        first, jobs = self._track.settings[0], []
        for method in methods:
            if not self._is_tuned(method):
                overrides = self._track.overrides(method, {}, first)
                jobs.append(Job(method, TUNED, self._requests[method], first, 0, overrides))

        self._require_data(jobs)

        def ended(job: Job, knobs: dict[str, str]) -> None:
            found = {"request": job.request, "trials": self._trials, "rules": RULES}
            found |= {"setting": dict(first), "knobs": knobs}
            self._store.about["tuned"][job.method] = found
            chosen = " ".join(f"{key}={value}" for key, value in knobs.items())
            say(f"{job.method}: the search chose {chosen or 'nothing, since the method declares no knobs'}")

        self._wait({pool.submit(search, job, self._out, self._trials): job for job in jobs}, ended)

    def _wait(self, running: dict[Future[Any], Job], ended: Callable[[Job, Any], None]) -> None:
        """Call `ended` with each result as it comes; a method that fails loses the rest of its work."""
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                if future.cancelled():
                    continue
                try:
                    ended(job, future.result())
                except TerminatedWorkerError:
                    raise
                except UserError as error:
                    self._give_up(self.refused, job, str(error), running)
                except Exception as error:
                    self._give_up(self.failed, job, f"{type(error).__name__}: {first_line(error)}", running)
                self._save()

    def _save(self) -> None:
        """Write the rows; a track that refuses every method leaves no file."""
        if self._store.rows:
            self._store.save()

    def _give_up(self, found: dict[str, str], job: Job, why: str, running: dict[Future[Any], Job]) -> None:
        """Note why a method has no more rows, and take back what has not begun of it."""
        found[job.method] = self._store.about["not_run"][job.method] = why
        say(f"{job.method} ({job.kind}) is not run: {why}")
        for future, other in running.items():
            if other.method == job.method:
                future.cancel()
