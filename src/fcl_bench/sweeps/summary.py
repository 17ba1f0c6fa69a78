"""What the user reads of a sweep: how far it is, how long it still takes, what came out, what failed."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.table import Table

from fcl_bench.sweeps.jobs import DONE, FAILED, INTERRUPTED, RUNNING, JobReport
from fcl_bench.tracking.progress import duration

#: Settings that the table on the screen has at most; `fcl-tables` has all.
_MOST = 40
#: Different warnings that are repeated at the end.
_WARNINGS = 8


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


def varying(jobs: Iterable[Sequence[str]]) -> set[str]:
    """The keys whose values differ between the jobs of a sweep, by their overrides."""
    values: dict[str, set[str]] = {}
    count = 0
    for job in jobs:
        count += 1
        for override in job:
            values.setdefault(override.partition("=")[0], set()).add(override)
    return {key for key, found in values.items() if len(found) > 1} if count > 1 else set()


def name_of(overrides: Iterable[str], keys: set[str]) -> str:
    """The overrides of a job that tell it from the others: those of `keys`; all of them if that leaves none."""
    own = list(overrides)
    return " ".join([text for text in own if text.partition("=")[0] in keys] or own) or "defaults"


def end_line(report: JobReport, total: int | None, keys: set[str], elsewhere: bool = False) -> str:
    """One ended job, with its accuracy, or with what ended it; a cluster (`elsewhere`) may start it again."""
    which = f"run {report.number + 1}" + ("" if total is None else f" of {total}")
    what = name_of(report.overrides, keys)
    if report.status != DONE:
        again = ", and is queued again if it met its time limit" if elsewhere and report.status == INTERRUPTED else ""
        return f"{which} {report.status}{again}: {what}" + (f": {report.reason}" if report.reason else "")
    how = "was complete already" if report.was_complete else f"done in {duration(report.seconds)}"
    return f"{which} {how}: {what}" + (
        f": A_avg {_percent(report, 'A_avg')}, A_T {_percent(report, 'A_T')}" if report.result else ""
    )


def results_table(reports: Iterable[JobReport], keys: set[str]) -> tuple[Table, str] | None:
    """One row per setting (what varies but the seed), in the order of the jobs, and a line with the best; None if
    nothing was measured.

    Cells are means over the seeds with the standard deviation (n - 1), and the best run's A_T beside.
    """
    settings: dict[str, list[JobReport]] = {}
    for report in reports:
        if report.status == DONE and report.result:
            settings.setdefault(name_of(report.overrides, keys - {"seed"}), []).append(report)
    if not settings:
        return None
    if not keys - {"seed"}:
        settings = {"all runs": [report for found in settings.values() for report in found]}
    headers = ("setting", "runs", "A_avg (%)", "A_T (%)", "best A_T (seed)", "upload (MiB)")
    rows = [
        [
            name,
            str(len(found)),
            _mean(found, "A_avg"),
            _mean(found, "A_T"),
            _best(found, "A_T"),
            _mean(found, "up_max_mib"),
        ]
        for name, found in settings.items()
    ]
    left_out = f" ({len(rows) - _MOST} more settings are in the tables)" if len(rows) > _MOST else ""
    title = f"Results, mean over the seeds{left_out}"
    highest = max(settings, key=lambda name: _value(settings[name], "A_T"))
    line = f"highest mean A_T: {highest}" if len(settings) > 1 and _value(settings[highest], "A_T") > -1 else ""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows[:_MOST]:
        table.add_row(*row)
    return table, line


def failures(reports: Iterable[JobReport], output: str = "") -> list[str]:
    """Two lines for each failed job: why, and the command that repeats it.

    Args:
        output: where what a job printed is, with `{}` for its number; told of those that met a bug.
    """
    failed = [report for report in reports if report.status == FAILED]
    lines = []
    for report in failed:
        where = f"; its traceback is in {output.format(report.number)}" if output and report.code == 1 else ""
        lines += [f"  {report.reason}{where}", f"    {report.command}"]
    return lines


def unheard(reports: Iterable[JobReport]) -> list[str]:
    """A line for each job that has begun and not ended: the command that repeats it."""
    return [f"    {report.command}" for report in reports if report.status == RUNNING]


def warnings(reports: Iterable[JobReport]) -> list[str]:
    """Each warning of any run once, with how many runs had it."""
    count = Counter(text for report in reports for text in report.warnings)
    lines = [f"  {text}" + (f" ({runs} runs)" if runs > 1 else "") for text, runs in count.items()]
    more = [f"  and {len(lines) - _WARNINGS} more, in what the runs printed"] if len(lines) > _WARNINGS else []
    return lines[:_WARNINGS] + more


def _values(reports: Iterable[JobReport], measure: str) -> list[float]:
    return [value for report in reports if (value := report.result.get(measure)) is not None and math.isfinite(value)]


def _value(reports: Iterable[JobReport], measure: str) -> float:
    """The mean; -1 where no run has the measure."""
    found = _values(reports, measure)
    return statistics.fmean(found) if found else -1.0


def _mean(reports: Iterable[JobReport], measure: str) -> str:
    found = _values(reports, measure)
    if not found:
        return "not defined"
    digits = ".3g" if measure.endswith("_mib") else ".2f"
    spread = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 and not measure.endswith("_mib") else ""
    return f"{statistics.fmean(found):{digits}}{spread}"


def _best(reports: Iterable[JobReport], measure: str) -> str:
    found = [report for report in reports if _values([report], measure)]
    if not found:
        return "not defined"
    best = max(found, key=lambda report: report.result[measure] or 0.0)
    seed = next((f" ({text.partition('=')[2]})" for text in best.overrides if text.startswith("seed=")), "")
    return f"{best.result[measure]:.2f}{seed if len(found) > 1 else ''}"


def _percent(report: JobReport, measure: str) -> str:
    value = report.result.get(measure)
    return "not defined" if value is None else f"{value:.2f}"
