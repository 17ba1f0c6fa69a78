"""A summary as Markdown, as LaTeX and on the terminal: the same cells, mean ± standard deviation over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fcl_bench.config import text
from fcl_bench.results.measures import MEASURES, Measure
from fcl_bench.results.summarise import CEILING, CEILINGS, knobs, setting, signature, varying_setting
from fcl_bench.results.tables.cells import NOT_DEFINED, Cell, Sheet, decimals, marked_by_group, mean_and_spread, number
from fcl_bench.results.tables.latex import latex_table
from fcl_bench.results.tables.markdown import markdown_table

#: Shown unless others are asked for.
_SHOWN = (
    *("A_avg", "A_T", "forgetting"),
    *("A_T_aware", "A_T_unrouted", "routing"),
    *("up_max_mib", "adapt_up_mib", "seconds_per_task", "fedran_mib", "stsa_mib"),
)
NOTE = (
    "Mean ± standard deviation over n seeds. Upload: measured, of the busiest client and task. "
    f"In each setting the best accuracy is bold and the second underlined ({CEILING}, the ceiling, aside)."
)


def constants(summary: pd.DataFrame) -> list[str]:
    """What all rows share, in one line; then what the rows of each method share, in another."""
    methods = {method: _shared(rows, knobs(rows)) for method, rows in summary.groupby("method")}
    lines = [_shared(summary, setting(summary)), "; ".join(f"{name}: {told}" for name, told in methods.items() if told)]
    return [line for line in lines if line]


def cells(summary: pd.DataFrame, measures: Sequence[Measure] = ()) -> tuple[list[str], list[list[Cell]]]:
    """Headers and rows: the setting where it varies, the label, n, and the measures. No cell is empty or NaN."""
    varying = varying_setting(summary)
    shown = list(measures) or [MEASURES[name] for name in _SHOWN if MEASURES[name].shown_for(summary[f"{name}_mean"])]
    marked = {measure.name: marks(summary, measure) for measure in shown if measure.name.startswith("A_")}
    rows: list[list[Cell]] = []
    for index, row in summary.iterrows():
        rows.append([(text(row[column]) or "none", "") for column in varying])
        rows[-1] += [(row["label"], ""), (str(row["n"]), "")]
        rows[-1] += [(value(row, m), marked[m.name][index] if m.name in marked else "") for m in shown]
    return [*varying, "method", "n", *(measure.header for measure in shown)], rows


def markdown(summary: pd.DataFrame, measures: Sequence[Measure] = ()) -> str:
    """The summary as a Markdown page."""
    return "\n\n".join([*constants(summary), markdown_table(summary_sheet(summary, measures)), NOTE]) + "\n"


def latex(summary: pd.DataFrame, measures: Sequence[Measure] = ()) -> str:
    """The summary as a LaTeX tabular."""
    return latex_table(summary_sheet(summary, measures))


def terminal_table(summary: pd.DataFrame, width: float, measures: Sequence[Measure] = ()) -> tuple[Table, list[str]]:
    """The summary for rich, a line between settings; and the last columns, left out to keep it within `width`."""
    headers, rows = cells(summary, measures)
    widths = [3 + max(cell_len(header), *(cell_len(row[i][0]) for row in rows)) for i, header in enumerate(headers)]
    shown = len(headers)
    while 1 + sum(widths[:shown]) > width and shown > headers.index("n") + 3:
        shown -= 1
    table = Table()
    for position, header in enumerate(headers[:shown]):
        table.add_column(header, justify="left" if position < headers.index("n") else "right", overflow="fold")
    blocks = [*signature(summary, setting(summary)), None]
    for row, block, following in zip(rows, blocks, blocks[1:], strict=False):
        table.add_row(*(Text(*cell) for cell in row[:shown]), end_section=block != following)
    return table, headers[shown:]


def value(row: pd.Series, measure: Measure) -> str:
    """Mean and standard deviation of one row of a summary."""
    mean, std = row[f"{measure.name}_mean"], row[f"{measure.name}_std"]
    return NOT_DEFINED if math.isnan(mean) else mean_and_spread(mean, std, decimals(mean, measure))


def marks(summary: pd.DataFrame, measure: Measure) -> pd.Series:
    """Per row, the mark of the best and the second of each setting, the ceilings aside."""
    competes = ~summary["method"].isin(CEILINGS) & summary[f"{measure.name}_mean"].notna()
    printed = summary.loc[competes, f"{measure.name}_mean"].map(lambda mean: number(mean, measure))
    marked = marked_by_group(printed, signature(summary[competes], setting(summary)), measure.higher)
    return marked.reindex(summary.index, fill_value="")


def summary_sheet(summary: pd.DataFrame, measures: Sequence[Measure] = ()) -> Sheet:
    """The summary as a table, with its constants and its note."""
    headers, rows = cells(summary, measures)
    return Sheet("Summary", headers, rows, headers.index("n"), [*constants(summary), NOTE])


def _shared(rows: pd.DataFrame, columns: list[str]) -> str:
    """The columns with one value in all rows, less what is null, absent or a mere fingerprint."""
    values = {column: set(rows[column].map(text)) for column in columns if "fingerprint" not in column}
    told = {column: min(found) for column, found in values.items() if len(found) == 1 and column != "features"}
    return ", ".join(f"{c.removeprefix('method.')} {v}" for c, v in told.items() if v not in ("", "null"))
