"""What a job of a sweep tells the parent: a small JSON file in the sweep's folder, whichever process ran it."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fcl_bench.files import replacing

#: States of a job. One whose process died stays at RUNNING; one that never started has no file, and is WAITING.
WAITING, RUNNING, DONE, FAILED, INTERRUPTED = "waiting", "running", "done", "failed", "interrupted"


@dataclass
class JobReport:
    """`<sweep folder>/jobs/<number>.json`.

    Attributes:
        number: of the job in its sweep, from 0.
        overrides: what makes this job, as the user would type it.
        status: see the states above.
        code: the exit code that the job alone would have had; None until it ends.
        reason: of a failure, in one line.
        was_complete: whether the run was complete before, and only reported.
        seconds: from its start to its end.
        run: the run's folder.
        result: of a run that is complete, its accuracies in percent and its upload in MiB; None where not defined.
        warnings: what the run warned of, each text once.
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

    @property
    def command(self) -> str:
        """What repeats this job alone."""
        return shlex.join(["fcl-bench", *self.overrides])


def output_path(sweep: Path, number: int) -> Path:
    """Where a job that runs beside others prints."""
    return sweep / "jobs" / f"{number}.log"


def write_report(sweep: Path, report: JobReport) -> None:
    """Put the report in its place, whole or not at all."""
    with replacing(sweep / "jobs" / f"{report.number}.json") as temporary:
        temporary.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")


@contextmanager
def reported(sweep: Path, report: JobReport) -> Iterator[None]:
    """A block that carries out a job and sets the code of its `report`, which is in its place from start to end."""
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


def read_reports(sweep: Path) -> dict[int, JobReport]:
    """Every job's report so far, by number."""
    reports = (JobReport(**json.loads(path.read_text())) for path in (sweep / "jobs").glob("[0-9]*.json"))
    return dict(sorted((report.number, report) for report in reports))
