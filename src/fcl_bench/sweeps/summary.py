"""The texts about a sweep for the user: progress, time left, results and failures."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from fcl_bench.sweeps.jobs import DONE, FAILED, INTERRUPTED, RUNNING, JobReport
from fcl_bench.tracking.console import duration

#: The largest number of settings in the table on the screen; `fcl-tables` shows all.
_MOST = 40
#: The largest number of different warnings that are repeated at the end.
_WARNINGS = 8


def progress_line(reports: Iterable[JobReport], total: int, workers: int) -> str:
    """A line such as `3 done, 2 running, 1 failed, 6 to come, about 4 min left`.

    The time left is the mean time of the runs that were carried out (runs that were complete before take none) times
    the number of jobs still to come, divided by the number of jobs side by side.
    """
    reports = list(reports)
    count = Counter(report.status for report in reports)
    to_come = total - len(reports)
    words = [*(f"{count[status]} {status}" for status in (DONE, RUNNING, FAILED)), f"{to_come} to come"]
    carried_out = [report.seconds for report in reports if report.status == DONE and not report.was_complete]
    to_do = to_come + count[RUNNING]
    if carried_out and to_do:
        seconds = statistics.fmean(carried_out) * to_do / max(1, min(workers, to_do))
        words.append(f"about {duration(seconds)} left")
    return ", ".join(words)


def varying(jobs: Iterable[Sequence[str]]) -> set[str]:
    """The keys whose values differ between the jobs of a sweep, given the overrides of each job."""
    every = [set(job) for job in jobs]
    return {override.partition("=")[0] for override in set().union(*every) if not all(override in job for job in every)}


def name_of(overrides: Iterable[str], keys: set[str]) -> str:
    """The overrides of a job that distinguish it: those of `keys`, or all of them if that leaves none."""
    own = list(overrides)
    return " ".join([text for text in own if text.partition("=")[0] in keys] or own) or "defaults"


def end_line(report: JobReport, total: int, keys: set[str], elsewhere: bool = False) -> str:
    """A line about an ended job: its accuracy or its failure; a cluster (`elsewhere`) may start it again."""
    which = f"run {report.number + 1} of {total}"
    what = name_of(report.overrides, keys)
    if report.status != DONE:
        again = ", and is queued again if it met its time limit" if elsewhere and report.status == INTERRUPTED else ""
        return f"{which} {report.status}{again}: {what}" + (f": {report.reason}" if report.reason else "")
    how = "was complete already" if report.was_complete else f"done in {duration(report.seconds)}"
    return f"{which} {how}: {what}" + (
        f": A_avg {_percent(report, 'A_avg')}, A_T {_percent(report, 'A_T')}" if report.result else ""
    )


def results_table(reports: Iterable[JobReport], keys: set[str]) -> Table | None:
    """A table with one row per setting (the varying keys except the seed), in the order of the jobs; None if nothing
    was measured.

    Cells are means over the seeds with the standard deviation (n - 1).
    """
    settings: dict[str, list[JobReport]] = {}
    for report in reports:
        if report.status == DONE and report.result:
            settings.setdefault(name_of(report.overrides, keys - {"seed"}), []).append(report)
    if not settings:
        return None
    if not keys - {"seed"}:
        settings = {"all runs": [report for found in settings.values() for report in found]}
    headers = ("setting", "runs", "A_avg (%)", "A_T (%)", "upload (MiB)")
    left_out = f" ({len(settings) - _MOST} more settings are in the tables)" if len(settings) > _MOST else ""
    title = f"Results, mean over the seeds{left_out}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 0 else "right", overflow="fold")
    for name, found in list(settings.items())[:_MOST]:
        measured = (_mean(found, "A_avg"), _mean(found, "A_T"), _mean(found, "up_max_mib"))
        met = sorted({gate for report in found for gate in report.gates})
        name += f" [gate: {', '.join(met)}]" if met else ""
        table.add_row(Text(name), str(len(found)), *measured)  # a list in brackets, such as presets, is no markup
    return table


def failures(reports: Iterable[JobReport], output: str = "") -> list[str]:
    """Each reason for which jobs failed, and below it the commands that repeat these jobs.

    Args:
        output: the path of a job's output, with `{}` for its number; it is named for jobs that met a bug.
    """
    commands: dict[str, list[str]] = {}
    for report in reports:
        if report.status == FAILED:
            where = f"; its traceback is in {output.format(report.number)}" if output and report.code == 1 else ""
            commands.setdefault(f"  {report.reason}{where}", []).append(f"    {report.command}")
    return [line for reason, found in commands.items() for line in (reason, *found)]


def warnings(reports: Iterable[JobReport]) -> list[str]:
    """Each warning once, with the number of runs that had it."""
    count = Counter(text for report in reports for text in report.warnings)
    lines = [f"  {text}" + (f" ({runs} runs)" if runs > 1 else "") for text, runs in count.items()]
    more = [f"  and {len(lines) - _WARNINGS} more, in what the runs printed"] if len(lines) > _WARNINGS else []
    return lines[:_WARNINGS] + more


def _values(reports: Iterable[JobReport], measure: str) -> list[float]:
    return [value for report in reports if (value := report.result.get(measure)) is not None and math.isfinite(value)]


def _mean(reports: Iterable[JobReport], measure: str) -> str:
    found = _values(reports, measure)
    if not found:
        return "not defined"
    digits = ".3g" if measure.endswith("_mib") else ".2f"
    spread = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 and not measure.endswith("_mib") else ""
    return f"{statistics.fmean(found):{digits}}{spread}"


def _percent(report: JobReport, measure: str) -> str:
    value = report.result.get(measure)
    return "not defined" if value is None else f"{value:.2f}"
