"""The tables of a summary: all of it in one, and accuracy, communication and runtime in rows and columns of choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
from rich.cells import cell_len
from rich.table import Table as ScreenTable
from rich.text import Text

from fcl_bench.config import text
from fcl_bench.errors import UserError, choices
from fcl_bench.results.best import Verdict
from fcl_bench.results.measures import MEASURES, SECTIONS, Measure
from fcl_bench.results.summarise import knobs, setting, signature, varying_setting
from fcl_bench.results.tables.cells import NOT_DEFINED, NOT_RUN, Cell, Sheet, Table, decimals, mean_cell, value_cell
from fcl_bench.results.tables.rivals import constants, indifferent, legend, verdicts

#: Numbers that differ in these never share a column, such as seconds of two devices or accuracies of two protocols.
ALWAYS_APART = ("device", "protocol")
#: Columns of the difference from the best, and its interval -> the attribute of a `Verdict`.
_INTERVAL = {"behind": "behind", "behind_low": "low", "behind_high": "high"}
#: The measures of the summary unless others are asked for.
_SHOWN = (
    *("A_avg", "A_T", "forgetting"),
    *("A_T_aware", "A_T_unrouted", "routing"),
    *("up_max_mib", "times_raw", "adapt_up_mib", "client_storage_mib", "client_samples_kept"),
    *("revealed_percent", "synthetic_images", "sample_gradients", "reconstructed_images"),
    *("seconds_per_task", "fedran_mib", "stsa_mib"),
)
#: The measures of them on the screen.
_ON_SCREEN = ("A_avg", "A_T", "forgetting", "up_max_mib", "seconds_per_task")


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
    return list(dict.fromkeys(by)) or ["method", *(c for c in varying_setting(summary) if c not in ALWAYS_APART)]


def summary_table(runs: pd.DataFrame, summary: pd.DataFrame, measures: Sequence[Measure] = ()) -> Table:
    """Return the table with one row per configuration; for programs it has all measures of each.

    Args:
        runs: the result of `used_runs`.
        summary: the result of `summarise` for these runs.
        measures: the measures for readers; if empty, the most important ones.
    """
    shown = list(measures) or [MEASURES[name] for name in _SHOWN if MEASURES[name].shown_for(summary[f"{name}_mean"])]
    lists = {column: [" ".join(map(str, value)) for value in summary[column]] for column in ("seeds", "run_ids")}
    return replace(
        _table("summary", summary, shown, ["method", *varying_setting(summary)]),
        values=summary.drop(columns=["family", "values", "folders"]).assign(**lists),
        runs=runs[["label", *runs.columns.drop(["label", "family", "written", "path"])]],
    )


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
    return {name: _table(name, summary, columns, by) for name, columns in tables.items() if columns}


def _table(name: str, summary: pd.DataFrame, measures: list[Measure], by: list[str]) -> Table:
    varying = varying_setting(summary)
    # A label holds the method and its knobs that vary.
    keys = ["label" if key == "method" else key for key in by]
    apart = [key for key in dict.fromkeys((*ALWAYS_APART, *varying)) if key in varying and key not in by]
    apart += [] if "label" in keys else ["label"]
    column_of = signature(summary, apart)
    columns = [(_heading(group.iloc[0], apart), key) for key, group in summary.groupby(column_of, sort=False)]
    rated = [measure for measure in measures if name != "summary" or measure.name.startswith("A_")]
    found = {measure.name: verdicts(summary, measure) for measure in rated}
    # A row of one configuration says n and its gates once, other rows in each cell.
    alone = not apart
    headers = [*by, *["n"] * alone, *(f"{m.header}, {of}" if of else m.header for of, _ in columns for m in measures)]
    sheet_rows: list[list[Cell]] = []
    values: list[dict[str, object]] = []
    runs: list[dict[str, object]] = []
    for _, group in summary.groupby(signature(summary, keys), sort=False):
        first = {shown: group[key].iloc[0] for shown, key in zip(by, keys, strict=True)}
        cells = [value_cell(found) for found in first.values()]
        values.append({key: text(found) if pd.isna(found) else found for key, found in first.items()})
        runs.append(dict(values[-1]))
        if alone:
            cells[by.index("method")] = _gated(cells[by.index("method")], group.iloc[0])
            cells.append(value_cell(group["n"].iloc[0]))
        for heading, key in columns:
            there = group[column_of[group.index] == key]
            if len(there) > 1:
                raise AssertionError(f"{len(there)} configurations in one cell: {by} and {apart} are too few")
            row = there.iloc[0] if len(there) else None
            runs[-1][_column("run_ids", heading)] = NOT_RUN if row is None else " ".join(row["run_ids"])
            for measure in measures:
                verdict = Verdict() if row is None or measure not in rated else found[measure.name][row.name]
                cells.append(_cell(row, measure, verdict, alone))
                numbers = _numbers(row, measure, verdict)
                values[-1] |= {_column(f"{measure.name}_{k}", heading): v for k, v in numbers.items()}
        sheet_rows.append(cells)
    seeds = "n seeds." if alone else "seeds (number of seeds)."
    words = [measure.note for measure in measures if measure.note]
    told = indifferent(summary) if any(measure.section == "accuracy" for measure in measures) else ""
    note = " ".join(filter(None, [f"Mean ± standard deviation over {seeds}", told, legend(summary, found)]))
    notes = [*constants(summary), *([" ".join(words)] if words else []), note]
    facets = tuple(place for place, key in enumerate(by) if key != "method" and not key.startswith("method."))
    # A table without methods keeps its columns: they name its rows.
    facets = facets if len(facets) < len(by) else ()
    sheet = Sheet(name.capitalize(), headers, sheet_rows, len(by), notes, facets)
    return Table(name, sheet, pd.DataFrame(values), pd.DataFrame(runs))


def _heading(row: pd.Series, apart: list[str]) -> str:
    """Describe a column, such as "beta 0.1, cpu"; device, protocol and method are given without their keys."""
    themselves = (*ALWAYS_APART, "label")
    apart = [key for key in apart if key != "beta" or text(row[key])]  # only a partition with a beta names it
    return ", ".join(text(row[key]) if key in themselves else f"{key} {text(row[key]) or 'none'}" for key in apart)


def _column(name: str, heading: str) -> str:
    return f"{name} [{heading}]" if heading else name


def _cell(row: pd.Series | None, measure: Measure, verdict: Verdict, alone: bool) -> Cell:
    if row is None:
        return Cell(NOT_RUN, absent=True)
    mean = row[f"{measure.name}_mean"]
    places, n = decimals(mean, measure), None if alone else row["n"]
    cell = replace(mean_cell(mean, row[f"{measure.name}_std"], places, verdict.mark, n), title=verdict.why)
    return cell if alone else _gated(cell, row)


def _gated(cell: Cell, row: pd.Series) -> Cell:
    """Return the cell with the gates that a row of a summary meets, and on a page why."""
    return replace(cell, text=f"{cell.text} [gate: {row['gates']}]", title=row["gate_texts"]) if row["gates"] else cell


def _numbers(row: pd.Series | None, measure: Measure, verdict: Verdict) -> dict[str, object]:
    if row is None:
        return dict.fromkeys(("mean", "std", "n", *_INTERVAL), NOT_RUN)
    parts = {part: row[f"{measure.name}_{part}"] for part in ("mean", "std")}
    parts |= {"n": row["n"], **{name: getattr(verdict, part) for name, part in _INTERVAL.items()}}
    return {part: NOT_DEFINED if pd.isna(found) else found for part, found in parts.items()}


def screen_table(summary: pd.DataFrame, sheet: Sheet, width: int, whole: bool) -> tuple[ScreenTable, list[str]]:
    """Return the summary for rich with lines between settings, and the headers of columns that are only in the files.

    Those are the last columns, if they do not fit in `width`, and unless the `whole` table is asked for all but a few.
    """
    few = {MEASURES[name].header for name in _ON_SCREEN}
    shown = [at for at, header in enumerate(sheet.headers) if whole or at <= sheet.texts or header in few]
    widths = [
        3 + max(map(cell_len, (header, *(row[at].text for row in sheet.rows))))
        for at, header in enumerate(sheet.headers)
    ]
    while 1 + sum(widths[at] for at in shown) > width and len(shown) > sheet.texts + 3:
        shown.pop()
    table = ScreenTable()
    for at in shown:
        table.add_column(sheet.headers[at], justify="left" if at < sheet.texts else "right", overflow="fold")
    blocks = [*signature(summary, setting(summary)), None]
    for row, block, following in zip(sheet.rows, blocks, blocks[1:], strict=False):
        table.add_row(*(Text(row[at].text, row[at].mark) for at in shown), end_section=block != following)
    return table, [header for at, header in enumerate(sheet.headers) if at not in shown]
