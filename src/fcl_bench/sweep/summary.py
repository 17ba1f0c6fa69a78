"""What the user reads of a sweep: how far it is, how long it still takes, what failed and how to repeat it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fcl_bench.sweep.jobs import DONE, FAILED, INTERRUPTED, RUNNING, JobReport


def progress_line(reports: Iterable[JobReport], total: int | None, workers: int) -> str:
    """`3 done, 2 running, 1 failed, 6 to come, about 4 min left`.

    The time left is the mean of the runs that were carried out (those that were complete before take none) times what
    is still to come, over the jobs side by side.

    Args:
        reports: of the jobs that have started.
        total: number of jobs, None if not known.
        workers: jobs side by side.
    """
    reports = list(reports)
    count = Counter(report.status for report in reports)
    words = [f"{count[status]} {status}" for status in (DONE, RUNNING, FAILED)]
    if total is not None:
        words.append(f"{total - len(reports)} to come")
        carried_out = [report.seconds for report in reports if report.status == DONE and not report.was_complete]
        to_do = total - len(reports) + count[RUNNING]
        if carried_out and to_do:
            seconds = sum(carried_out) / len(carried_out) * to_do / max(1, min(workers, to_do))
            words.append(f"about {duration(seconds)} left")
    return ", ".join(words)


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def job_name(number: int, total: int | None) -> str:
    """`run 3 of 12`, of the job with number 2; `run 3` if their number is not known."""
    return f"run {number + 1}" + ("" if total is None else f" of {total}")


def end_line(report: JobReport, total: int | None, elsewhere: bool = False) -> str:
    """One ended job of several side by side; `elsewhere` is on a cluster, which may start it again."""
    which = job_name(report.number, total)
    what = " ".join(report.overrides) or "defaults"
    if report.status == DONE:
        how = "was complete already" if report.was_complete else f"done in {duration(report.seconds)}"
        return f"{which} {how}: {what}"
    again = ", and is queued again if it met its time limit" if elsewhere and report.status == INTERRUPTED else ""
    return f"{which} {report.status}{again}: {what}"


def failures(reports: Iterable[JobReport]) -> list[str]:
    """Two lines for each failed job: why, and the command that repeats it."""
    failed = (report for report in reports if report.status == FAILED)
    return [line for report in failed for line in (f"  {report.reason}", f"    {report.command}")]


def unheard(reports: Iterable[JobReport]) -> list[str]:
    """A line for each job that has begun and not ended: the command that repeats it."""
    return [f"    {report.command}" for report in reports if report.status == RUNNING]
