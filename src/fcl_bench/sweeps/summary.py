"""The texts about a sweep for the user: jobs that ended, results and failures."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from rich.markup import escape
from rich.table import Table

from fcl_bench.execution.screen import indifference, screen_table
from fcl_bench.results.measures import MEASURES
from fcl_bench.results.tables.cells import decimals, mean_cell
from fcl_bench.sweeps.jobs import DONE, FAILED, JobReport
from fcl_bench.tracking.console import duration

#: The largest number of settings in the table on the screen; `fcl-tables` shows all.
_MOST = 40
#: The largest number of different warnings that are repeated at the end.
_WARNINGS = 8


def varying(jobs: Iterable[Sequence[str]]) -> set[str]:
    """The keys whose values differ between the jobs of a sweep, given the overrides of each job."""
    every = [set(job) for job in jobs]
    return {override.partition("=")[0] for override in set().union(*every) if not all(override in job for job in every)}


def name_of(overrides: Iterable[str], keys: set[str]) -> str:
    """The overrides of a job that distinguish it: those of `keys`, or all of them if that leaves none."""
    own = list(overrides)
    return " ".join([text for text in own if text.partition("=")[0] in keys] or own) or "defaults"


def end_line(report: JobReport, total: int, keys: set[str]) -> str:
    """A line about an ended job: its accuracy or its failure."""
    which = f"run {report.number + 1} of {total}"
    what = name_of(report.overrides, keys)
    if report.status != DONE:
        return f"{which} {report.status}: {what}" + (f": {report.reason}" if report.reason else "")
    how = "was complete already" if report.was_complete else f"done in {duration(report.seconds)}"
    scores = [f"{name} {_cell([report], name)}" for name in ("A_avg", "A_T")] if report.result else []
    return ": ".join([f"{which} {how}", what, *([", ".join(scores)] if scores else [])])


def results_table(reports: Iterable[JobReport], keys: set[str]) -> Table | None:
    """A table with one row per setting (the varying keys except the seed), in the order of the jobs; None if nothing
    was measured.

    Cells are as those of `fcl-tables`: means over the seeds with the standard deviation (n - 1).
    """
    settings: dict[str, list[JobReport]] = {}
    for report in reports:
        if report.status == DONE and report.result:
            name = name_of(report.overrides, keys - {"seed"}) if keys - {"seed"} else "all runs"
            settings.setdefault(name, []).append(report)
    if not settings:
        return None
    rows = []
    for name, found in list(settings.items())[:_MOST]:
        met = sorted({gate for report in found for gate in report.gates})
        name += f" [gate: {', '.join(met)}]" if met else ""
        measured = (_cell(found, measure) for measure in ("A_avg", "A_T", "up_max_mib"))
        rows.append([escape(name), str(len(found)), *measured])  # a list in brackets, such as presets, is no markup
    left_out = f" ({len(settings) - _MOST} more settings are in the tables)" if len(settings) > _MOST else ""
    headers = ("setting", "runs", "A_avg (%)", "A_T (%)", "upload (MiB)")
    return screen_table(f"Results, mean over the seeds{left_out}", headers, rows)


def unmoved(jobs: Iterable[Sequence[str]], keys: set[str]) -> str:
    """The sentence on settings that no partition changes, given the overrides of their jobs; "" for none."""
    moot = {key for key in keys if key in ("beta", "clients") or key.partition(".")[0] == "partition"}
    rest = keys - moot - {"seed"}
    names = dict.fromkeys(name_of(job, rest) if rest else "all runs" for job in jobs)
    return indifference(list(names), moot, "seed" in keys)


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
    """Each warning once, with the number of runs that had it; those that differ in numbers alone are one warning."""
    first: dict[str, str] = {}
    count = Counter(
        first.setdefault(re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", text), text)
        for report in reports
        for text in report.warnings
    )
    lines = [f"  {text}" + (f" ({runs} runs)" if runs > 1 else "") for text, runs in count.items()]
    more = [f"  and {len(lines) - _WARNINGS} more, in what the runs printed"] if len(lines) > _WARNINGS else []
    return lines[:_WARNINGS] + more


def _cell(reports: Sequence[JobReport], measure: str) -> str:
    values = np.array([report.result[measure] for report in reports], dtype=float)
    mean, std = float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else math.nan
    return mean_cell(mean, std, decimals(mean, MEASURES[measure])).text
