"""Turns a summary into one table for the screen, Markdown and LaTeX: mean ± standard deviation over seeds."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import pandas as pd
from rich.cells import cell_len
from rich.table import Table as ScreenTable
from rich.text import Text

from fcl_bench.config import text
from fcl_bench.results.best import LEGEND, Verdict, judged, remarks
from fcl_bench.results.measures import MEASURES, Measure
from fcl_bench.results.summarise import CEILINGS, NO_PART, knobs, setting, signature, varying_setting
from fcl_bench.results.tables.cells import Cell, Sheet, Table, decimals, mean_cell, value_cell
from fcl_bench.results.tables.markup import markdown_table

#: The measures that are shown unless others are asked for.
_SHOWN = (
    *("A_avg", "A_T", "forgetting"),
    *("A_T_aware", "A_T_unrouted", "routing"),
    *("up_max_mib", "times_raw", "adapt_up_mib", "client_storage_mib", "client_samples_kept"),
    *("revealed_percent", "synthetic_images", "sample_gradients", "reconstructed_images"),
    *("seconds_per_task", "fedran_mib", "stsa_mib"),
)
#: What the note below the table says of a measure if it is shown.
_NOTES = {
    "up_max_mib": "Upload: measured, of the busiest client and task.",
    "times_raw": "Uploads / raw samples: of everyone, against the same samples sent as they are.",
    "client_storage_mib": "Kept by a client: the most that one client held between its turns.",
    "revealed_percent": (
        "Samples told alone: training samples that were the only one of a sum or a covariance that was sent."
    ),
}


def constants(summary: pd.DataFrame) -> list[str]:
    """Return what all rows share in one line, then what the rows of each method share in another."""
    methods = {method: _shared(rows, knobs(rows)) for method, rows in summary.groupby("method")}
    lines = [_shared(summary, setting(summary)), "; ".join(f"{name}: {own}" for name, own in methods.items() if own)]
    return [line for line in lines if line]


def summary_table(runs: pd.DataFrame, summary: pd.DataFrame, measures: Sequence[Measure] = ()) -> Table:
    """Return the summary in its three forms.

    Args:
        runs: the result of `used_runs`.
        summary: the result of `summarise` for these runs.
        measures: the measures for readers; if empty, the most important ones.
    """
    lists = {column: [" ".join(map(str, value)) for value in summary[column]] for column in ("seeds", "run_ids")}
    behind = runs[["label", *runs.columns.drop(["label", "family", "written", "path"])]]
    values = summary.drop(columns=["family", "values", "folders"]).assign(**lists)
    return Table("summary", summary_sheet(summary, measures), values, behind)


def summary_sheet(summary: pd.DataFrame, measures: Sequence[Measure] = ()) -> Sheet:
    """Return the setting where it varies, the label, n and the measures, with the constants and the note below."""
    varying = varying_setting(summary)
    shown = list(measures) or [MEASURES[name] for name in _SHOWN if MEASURES[name].shown_for(summary[f"{name}_mean"])]
    found = {measure.name: verdicts(summary, measure) for measure in shown if measure.name.startswith("A_")}
    rows: list[list[Cell]] = []
    for index, row in summary.iterrows():
        label = Cell(f"{row['label']}{gated(row)}", title=row["gate_texts"])
        cells = [*(value_cell(row[column]) for column in varying), label, value_cell(row["n"])]
        cells += [measured_cell(row, m, found[m.name][index] if m.name in found else Verdict()) for m in shown]
        rows.append(cells)
    headers = [*varying, "method", "n", *(measure.header for measure in shown)]
    words = [_NOTES[measure.name] for measure in shown if measure.name in _NOTES]
    note = " ".join(["Mean ± standard deviation over n seeds.", *words, legend(summary, found)])
    return Sheet("Summary", headers, rows, headers.index("n"), [*constants(summary), note], tuple(range(len(varying))))


def summary_page(sheet: Sheet) -> str:
    """Return the summary as a Markdown page, with the constants above the table."""
    return "\n\n".join([*sheet.notes[:-1], markdown_table(sheet), sheet.notes[-1]]) + "\n"


def screen_table(summary: pd.DataFrame, sheet: Sheet, width: float) -> tuple[ScreenTable, list[str]]:
    """Return the summary for rich with lines between settings, and the last columns, which did not fit in `width`."""
    columns = zip(sheet.headers, *([cell.text for cell in row] for row in sheet.rows), strict=True)
    widths = [3 + max(map(cell_len, column)) for column in columns]
    shown = len(sheet.headers)
    while 1 + sum(widths[:shown]) > width and shown > sheet.texts + 3:
        shown -= 1
    table = ScreenTable()
    for position, header in enumerate(sheet.headers[:shown]):
        table.add_column(header, justify="left" if position < sheet.texts else "right", overflow="fold")
    blocks = [*signature(summary, setting(summary)), None]
    for row, block, following in zip(sheet.rows, blocks, blocks[1:], strict=False):
        table.add_row(*(Text(cell.text, cell.mark) for cell in row[:shown]), end_section=block != following)
    return table, sheet.headers[shown:]


def measured_cell(row: pd.Series, measure: Measure, verdict: Verdict, n: int | None = None) -> Cell:
    """Return mean and standard deviation of one row of a summary, with `n` in brackets if it is given."""
    mean = row[f"{measure.name}_mean"]
    cell = mean_cell(mean, row[f"{measure.name}_std"], decimals(mean, measure), verdict.mark, n)
    return replace(cell, title=verdict.why)


def verdicts(summary: pd.DataFrame, measure: Measure) -> dict[Hashable, Verdict]:
    """Return, per row, how it stands beside the best of its setting; ceilings do not compete, nor rows that meet a
    gate: they are no fair sample of their method.
    """
    found: dict[Hashable, Verdict] = {}
    competes = ~summary["method"].isin(CEILINGS) & (summary["gates"] == "") & summary[f"{measure.name}_mean"].notna()
    for _, rows in summary.groupby(signature(summary, setting(summary)), sort=False):
        runs = [
            dict(zip(row["seeds"], zip(row["values"][measure.name], row["folders"], strict=True), strict=True))
            if competes[index]
            else None
            for index, row in rows.iterrows()
        ]
        found |= zip(rows.index, judged(runs, measure.name, measure.higher), strict=True)
    return found


def legend(summary: pd.DataFrame, found: Mapping[str, Mapping[Hashable, Verdict]]) -> str:
    """Return what the marks mean, and what has no interval or is not compared.

    Args:
        summary: whose labels name the rows.
        found: name of a measure -> the result of `verdicts`.
    """
    named = [(summary["label"][index], verdict) for of in found.values() for index, verdict in of.items()]
    return " ".join(filter(None, [LEGEND, NO_PART, remarks(named)]))


def gated(row: pd.Series) -> str:
    """Return the gates that a row of a summary meets, in brackets behind a space; "" for none."""
    return f" [gate: {row['gates']}]" if row["gates"] else ""


def _shared(rows: pd.DataFrame, columns: list[str]) -> str:
    """Describe the columns with one value in all rows, except values that are null, absent or only a fingerprint."""
    values = {column: set(rows[column].map(text)) for column in columns if "fingerprint" not in column}
    shared = {column: min(found) for column, found in values.items() if len(found) == 1 and column != "features"}
    return ", ".join(f"{c.removeprefix('method.')} {v}" for c, v in shared.items() if v not in ("", "null"))
