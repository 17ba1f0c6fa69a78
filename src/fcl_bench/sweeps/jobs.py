"""The report of a sweep's job to the parent process: a small JSON file in the sweep's folder."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fcl_bench.composition import NAMED_BY
from fcl_bench.files import replacing

#: States of a job. A job whose process died stays RUNNING; a job that never started has no file and is WAITING.
WAITING, RUNNING, DONE, FAILED, INTERRUPTED = "waiting", "running", "done", "failed", "interrupted"


@dataclass
class JobReport:
    """The content of `<sweep folder>/jobs/<number>.json`, whichever process ran the job.

    Attributes:
        overrides: the overrides of this job, as the user would type them.
        code: the exit code that the job would have on its own; None until it ends.
        was_complete: whether the run was complete before and was only reported.
        seconds: the time from its start to its end.
        result: the accuracies in percent and the upload in MiB of a complete run; None where not defined.
        warnings: the run's warnings, each text once.
    """

    number: int
    overrides: list[str]
    status: str = RUNNING
    code: int | None = None
    reason: str = ""
    was_complete: bool = False
    seconds: float = 0.0
    run: str = ""
    result: dict[str, float | None] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    gates: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        """The command that repeats this job alone."""
        return shlex.join(["fcl-bench", *NAMED_BY, *self.overrides])


def output_path(sweep: Path, number: int) -> Path:
    """The file for the output of a job that runs beside others."""
    return sweep / "jobs" / f"{number}.log"


def write_report(sweep: Path, report: JobReport) -> None:
    """Write the report, whole or not at all."""
    with replacing(sweep / "jobs" / f"{report.number}.json") as temporary:
        temporary.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")


@contextmanager
def reported(sweep: Path, report: JobReport) -> Iterator[None]:
    """Keep `report` written while the block carries out a job and sets the report's code."""
    write_report(sweep, report)
    begin = time.perf_counter()
    try:
        yield
        report.status = DONE if report.code == 0 else FAILED
    except BaseException:
        report.status = INTERRUPTED
        raise
    finally:
        report.seconds = time.perf_counter() - begin
        write_report(sweep, report)


def read_reports(sweep: Path, without: Collection[int] = ()) -> dict[int, JobReport]:
    """Job number -> report, for every report so far that can be read; those of the jobs `without` are not opened."""
    found = {}
    files = {int(file.stem): file for file in (sweep / "jobs").glob("*.json") if file.stem.isdigit()}
    for number in sorted(files.keys() - set(without)):
        with suppress(ValueError, TypeError):  # a damaged file is as if the job had not started
            found[number] = JobReport(**json.loads(files[number].read_text()))
    return found
