"""The tables of a summary: all of it in one, and accuracy, communication and runtime in rows and columns of choice."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from fcl_bench.results.tables.rivals import Verdicts, constants, indifferent, legend, verdicts

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


def summary_table(
    runs: pd.DataFrame, summary: pd.DataFrame, measures: Sequence[Measure] = (), known: Verdicts | None = None
) -> Table:
    """Return the table with one row per configuration; for programs it has all measures of each.

    Args:
        runs: the result of `used_runs`.
        summary: the result of `summarise` for these runs.
        measures: the measures for readers; if empty, the most important ones.
        known: verdicts of other tables of these runs, to which those of this table are added.
    """
    shown = list(measures) or [MEASURES[name] for name in _SHOWN if MEASURES[name].shown_for(summary[f"{name}_mean"])]
    lists = {column: [" ".join(map(str, value)) for value in summary[column]] for column in ("seeds", "run_ids")}
    return replace(
        _table("summary", summary, shown, ["method", *varying_setting(summary)], constants(summary), known),
        values=summary.drop(columns=["family", "values", "folders"]).assign(**lists),
        runs=runs[["label", *runs.columns.drop(["label", "family", "written", "path"])]],
    )


def sections(
    summary: pd.DataFrame, measures: Sequence[Measure] = (), by: Sequence[str] = (), known: Verdicts | None = None
) -> dict[str, Table]:
    """Return name -> table, for those of `SECTIONS` that have a measure.

    Keys that vary and are not in `by` appear in the column headings, one column per combination; device and protocol
    always do. A setting has one device and one protocol, and a column has one accounting.

    Args:
        summary: the result of `summarise`, for runs whose labels leave out the knobs in `by`.
        measures: the measures to show; if empty, those that tables show without being asked.
        by: the columns that distinguish the rows; if empty, see `row_columns`.
        known: see `summary_table`.

    Raises:
        UserError: see `row_columns`.
    """
    shown = list(measures) or [m for m in MEASURES.values() if m.shown_for(summary[f"{m.name}_mean"])]
    by = row_columns(summary, by)
    tables = {name: [measure for measure in shown if measure.section == name] for name in SECTIONS}
    same = constants(summary)
    return {name: _table(name, summary, columns, by, same, known) for name, columns in tables.items() if columns}


def _table(
    name: str, summary: pd.DataFrame, measures: list[Measure], by: list[str], same: list[str], known: Verdicts | None
) -> Table:
    varying = varying_setting(summary)
    # A label holds the method and its knobs that vary.
    keys = ["label" if key == "method" else key for key in by]
    apart = [key for key in dict.fromkeys((*ALWAYS_APART, *varying)) if key in varying and key not in by]
    apart += [] if "label" in keys else ["label"]
    rated = [measure for measure in measures if name != "summary" or measure.section == "accuracy"]
    known = {} if known is None else known
    known |= verdicts(summary, [measure for measure in rated if measure.name not in known])
    found = {measure.name: known[measure.name] for measure in rated}
    rows: dict[str, dict[str, tuple[Hashable, dict[str, Any]]]] = {}
    headings: dict[str, str] = {}
    records = zip(summary.index, summary.to_dict("records"), strict=True)
    for kind, column, (place, row) in zip(signature(summary, keys), signature(summary, apart), records, strict=True):
        headings.setdefault(column, _heading(row, apart))
        if rows.setdefault(kind, {}).setdefault(column, (place, row))[1] is not row:
            raise AssertionError(f"several configurations in one cell: {by} and {apart} are too few")
    # A row of one configuration says n and its gates once, other rows in each cell.
    alone = not apart
    headers = [*by, *["n"] * alone]
    headers += [f"{m.header}, {heading}" if heading else m.header for heading in headings.values() for m in measures]
    sheet_rows: list[list[Cell]] = []
    values: list[dict[str, object]] = []
    runs: list[dict[str, object]] = []
    for there in rows.values():
        _, one = next(iter(there.values()))
        first = {shown: one[key] for shown, key in zip(by, keys, strict=True)}
        cells = [value_cell(found) for found in first.values()]
        values.append({key: text(found) if pd.isna(found) else found for key, found in first.items()})
        runs.append(dict(values[-1]))
        if alone:
            cells[by.index("method")] = _gated(cells[by.index("method")], one)
            cells.append(value_cell(one["n"]))
        for column, heading in headings.items():
            place, row = there.get(column, (None, None))
            runs[-1][_column("run_ids", heading)] = NOT_RUN if row is None else " ".join(row["run_ids"])
            for measure in measures:
                verdict = Verdict() if row is None or measure not in rated else found[measure.name][place]
                cells.append(_cell(row, measure, verdict, alone))
                numbers = _numbers(row, measure, verdict)
                values[-1] |= {_column(f"{measure.name}_{k}", heading): v for k, v in numbers.items()}
        sheet_rows.append(cells)
    seeds = "n seeds." if alone else "seeds (number of seeds)."
    words = [measure.note for measure in measures if measure.note]
    unmoved = indifferent(summary) if any(measure.section == "accuracy" for measure in measures) else ""
    note = " ".join(filter(None, [f"Mean ± standard deviation over {seeds}", unmoved, legend(summary, found)]))
    notes = [*same, *([" ".join(words)] if words else []), note]
    facets = tuple(place for place, key in enumerate(by) if key != "method" and not key.startswith("method."))
    # A table without methods keeps its columns: they name its rows.
    facets = facets if len(facets) < len(by) else ()
    sheet = Sheet(name.capitalize(), headers, sheet_rows, len(by), notes, facets)
    return Table(name, sheet, pd.DataFrame(values), pd.DataFrame(runs))


def _heading(row: Mapping[str, Any], apart: list[str]) -> str:
    """Describe a column, such as "beta 0.1, cpu"; device, protocol and method are given without their keys."""
    themselves = (*ALWAYS_APART, "label")
    apart = [key for key in apart if key != "beta" or text(row[key])]  # only a partition with a beta names it
    return ", ".join(text(row[key]) if key in themselves else f"{key} {text(row[key]) or 'none'}" for key in apart)


def _column(name: str, heading: str) -> str:
    return f"{name} [{heading}]" if heading else name


def _cell(row: Mapping[str, Any] | None, measure: Measure, verdict: Verdict, alone: bool) -> Cell:
    if row is None:
        return Cell(NOT_RUN, absent=True)
    mean = row[f"{measure.name}_mean"]
    places, n = decimals(mean, measure), None if alone else row["n"]
    cell = replace(mean_cell(mean, row[f"{measure.name}_std"], places, verdict.mark, n), title=verdict.why)
    return cell if alone else _gated(cell, row)


def _gated(cell: Cell, row: Mapping[str, Any]) -> Cell:
    """Return the cell with the gates that a row of a summary meets, and on a page why."""
    return replace(cell, text=f"{cell.text} [gate: {row['gates']}]", title=row["gate_texts"]) if row["gates"] else cell


def _numbers(row: Mapping[str, Any] | None, measure: Measure, verdict: Verdict) -> dict[str, object]:
    if row is None:
        return dict.fromkeys(("mean", "std", "n", *_INTERVAL), NOT_RUN)
    parts = {part: row[f"{measure.name}_{part}"] for part in ("mean", "std")}
    parts |= {"n": row["n"], **{name: getattr(verdict, part) for name, part in _INTERVAL.items()}}
    return {part: NOT_DEFINED if pd.isna(found) else found for part, found in parts.items()}


def screen_table(summary: pd.DataFrame, sheet: Sheet, width: int, whole: bool) -> tuple[ScreenTable, list[str]]:
    """Return the summary for rich, and the headers of columns that are only in the files.

    Those are the last columns, if they do not fit in `width`, and unless the `whole` table is asked for all but a few.
    Where settings have two rows or more, or would leave no room, each stands above its rows, and not in columns.
    """
    few = {MEASURES[name].header for name in _ON_SCREEN}
    blocks = list(signature(summary, setting(summary)))
    sizes = [
        max([*map(cell_len, header.split()), *(cell_len(row[place].text) for row in sheet.rows)])
        for place, header in enumerate(sheet.headers)
    ]
    crowded = sum(3 + size for size in sizes[: sheet.texts + 3]) > width
    above = sheet.facets if crowded or 2 * len(set(blocks)) <= len(blocks) else ()
    wanted = [place for place, header in enumerate(sheet.headers) if whole or place <= sheet.texts or header in few]
    places = [place for place in wanted if place not in above]
    wide = [sizes[place] for place in places]
    least = sum(place < sheet.texts for place in places) + 3
    # The method's column takes what the others leave, half of the width at least.
    while 4 + min(wide[0], width // 2) + sum(3 + size for size in wide[1:]) > width and len(wide) > least:
        wide.pop()
    table, shown = ScreenTable(), places[: len(wide)]
    fits = sum(3 + max(cell_len(sheet.headers[p]), size) for p, size in zip(shown, wide, strict=True)) < width
    for p, size in zip(shown, [None] * len(wide) if fits else [None, *wide[1:]], strict=True):
        table.add_column(sheet.headers[p], justify="left" if p < sheet.texts else "right", overflow="fold", width=size)
    for row, block, before, following in zip(sheet.rows, blocks, [None, *blocks], [*blocks[1:], None], strict=False):
        if above and block != before:
            table.add_row(Text(", ".join(f"{sheet.headers[p]} {row[p].text}" for p in above), "italic"))
        table.add_row(*(Text(row[p].text, row[p].mark) for p in shown), end_section=block != following)
    return table, [header for p, header in enumerate(sheet.headers) if p not in (*shown, *above)]
