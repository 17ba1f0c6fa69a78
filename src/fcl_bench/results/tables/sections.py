"""The tables of accuracy, communication and runtime: a summary arranged in rows and columns that the user chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from fcl_bench.config import text
from fcl_bench.errors import UserError, choices
from fcl_bench.results.best import Verdict
from fcl_bench.results.measures import MEASURES, SECTIONS, Measure
from fcl_bench.results.summarise import knobs, setting, signature, varying_setting
from fcl_bench.results.tables.cells import NOT_DEFINED, NOT_RUN, Cell, Sheet, Table, value_cell
from fcl_bench.results.tables.summary_table import constants, gated, legend, measured_cell, verdicts

#: Numbers that differ in these never share a column, such as seconds of two devices or accuracies of two protocols.
ALWAYS_APART = ("device", "protocol")
#: Columns of the difference from the best, and its interval -> the attribute of a `Verdict`.
_INTERVAL = {"behind": "behind", "behind_low": "low", "behind_high": "high"}
_NOTES = {
    "accuracy": "Percent.",
    "communication": (
        "Upload and download are measured: of the busiest client and task, as sent; of all tasks: of the busiest "
        "client over the stream. Raw samples: what that client's samples of that task would cost as they are, features "
        "in the wire's type or images in bytes, with their labels; the quotient is of everyone's uploads and samples. "
        "FedRAN's count: one task's upload in float64 with the nominal rank and label columns for all classes. STSA's "
        "count: all tasks' uploads in float32 with each task's own classes. The three do not compare with each other. "
        "Kept by a client: the most that one client held between its turns; raw samples are images, or rows of "
        "features, of earlier tasks. Samples told alone: the share of the training samples that were the only one of a "
        "sum, or of a Gram matrix or covariance, that left its client."
    ),
    "runtime": (
        "Seconds per task: mean over tasks of (mean over clients of the client's time + the server's), without "
        "features (FedRAN Eq. 1)."
    ),
}


def row_columns(summary: pd.DataFrame, by: Sequence[str]) -> list[str]:
    """Return the columns that distinguish the rows: `by`, or else the method and all that varies; not `ALWAYS_APART`.

    Raises:
        UserError: a key does not belong to the configuration, or always distinguishes columns.
    """
    known = ["method", *setting(summary), *knobs(summary)]
    for key in by:
        if key in ALWAYS_APART:
            raise UserError(f"--by {key}: numbers of two {key}s never share a column", "the other columns of the table")
        if key not in known:
            raise UserError(f"--by {key}: unknown key", choices([k for k in known if k not in ALWAYS_APART], key))
    return list(dict.fromkeys(by)) or [*(c for c in varying_setting(summary) if c not in ALWAYS_APART), "method"]


def sections(summary: pd.DataFrame, measures: Sequence[Measure] = (), by: Sequence[str] = ()) -> dict[str, Table]:
    """Return name -> table, for those of `SECTIONS` that have a measure.

    Keys that vary and are not in `by` appear in the column headings, one column per combination; device and protocol
    always do. A setting has one device and one protocol, and a column has one accounting.

    Args:
        summary: the result of `summarise`, for runs whose labels leave out the knobs in `by`.
        measures: the measures to show; if empty, those that tables show without being asked.
        by: the columns that distinguish the rows; if empty, see `row_columns`.

    Raises:
        UserError: see `row_columns`.
    """
    shown = list(measures) or [m for m in MEASURES.values() if m.shown_for(summary[f"{m.name}_mean"])]
    by = row_columns(summary, by)
    tables = {name: [measure for measure in shown if measure.section == name] for name in SECTIONS}
    return {name: _section(name, summary, columns, by) for name, columns in tables.items() if columns}


def _section(name: str, summary: pd.DataFrame, measures: list[Measure], by: list[str]) -> Table:
    varying = varying_setting(summary)
    # A label holds the method and its knobs that vary.
    keys = ["label" if key == "method" else key for key in by]
    apart = [key for key in dict.fromkeys((*ALWAYS_APART, *varying)) if key in varying and key not in by]
    apart += [] if "label" in keys else ["label"]
    column_of = signature(summary, apart)
    columns = [(_heading(group.iloc[0], apart), key) for key, group in summary.groupby(column_of, sort=False)]
    found = {measure.name: verdicts(summary, measure) for measure in measures}
    headers = [*by, *(f"{m.header}, {of}" if of else m.header for of, _ in columns for m in measures)]
    sheet_rows: list[list[Cell]] = []
    values: list[dict[str, object]] = []
    runs: list[dict[str, object]] = []
    for _, group in summary.groupby(signature(summary, keys), sort=False):
        first = {shown: group[key].iloc[0] for shown, key in zip(by, keys, strict=True)}
        cells = [value_cell(found) for found in first.values()]
        values.append({key: text(found) if pd.isna(found) else found for key, found in first.items()})
        runs.append(dict(values[-1]))
        for heading, key in columns:
            there = group[column_of[group.index] == key]
            if len(there) > 1:
                raise AssertionError(f"{len(there)} configurations in one cell: {by} and {apart} are too few")
            row = there.iloc[0] if len(there) else None
            runs[-1][_column("run_ids", heading)] = NOT_RUN if row is None else " ".join(row["run_ids"])
            for measure in measures:
                verdict = Verdict() if row is None else found[measure.name][row.name]
                cells.append(_cell(row, measure, verdict))
                numbers = _numbers(row, measure, verdict)
                values[-1] |= {_column(f"{measure.name}_{k}", heading): v for k, v in numbers.items()}
        sheet_rows.append(cells)
    notes = [
        *constants(summary),
        f"Mean ± standard deviation over seeds (number of seeds). {legend(summary, found)} {_NOTES[name]}",
    ]
    facets = tuple(place for place, key in enumerate(by) if key != "method" and not key.startswith("method."))
    # A table without methods keeps its columns: they name its rows.
    sheet = Sheet(name.capitalize(), headers, sheet_rows, len(by), notes, facets if len(facets) < len(by) else ())
    return Table(name, sheet, pd.DataFrame(values), pd.DataFrame(runs))


def _heading(row: pd.Series, apart: list[str]) -> str:
    """Describe a column, such as "beta 0.1, cpu"; device, protocol and method are given without their keys."""
    themselves = (*ALWAYS_APART, "label")
    apart = [key for key in apart if key != "beta" or text(row[key])]  # only a partition with a beta names it
    return ", ".join(text(row[key]) if key in themselves else f"{key} {text(row[key]) or 'none'}" for key in apart)


def _column(name: str, heading: str) -> str:
    return f"{name} [{heading}]" if heading else name


def _cell(row: pd.Series | None, measure: Measure, verdict: Verdict) -> Cell:
    if row is None:
        return Cell(NOT_RUN, absent=True)
    cell = measured_cell(row, measure, verdict, row["n"])
    return replace(cell, text=f"{cell.text}{gated(row)}", title=row["gate_texts"] or cell.title)


def _numbers(row: pd.Series | None, measure: Measure, verdict: Verdict) -> dict[str, object]:
    if row is None:
        return dict.fromkeys(("mean", "std", "n", *_INTERVAL), NOT_RUN)
    parts = {part: row[f"{measure.name}_{part}"] for part in ("mean", "std")}
    parts |= {"n": row["n"], **{name: getattr(verdict, part) for name, part in _INTERVAL.items()}}
    return {part: NOT_DEFINED if pd.isna(found) else found for part, found in parts.items()}
