"""A summary as Markdown and as a table on the terminal: the same cells, mean ± standard deviation over seeds."""

from __future__ import annotations

import math

import pandas as pd
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fcl_bench.report.collect import text
from fcl_bench.report.summary import CEILING, knobs, setting, signature, varying_setting

_HEADERS = {
    "A_avg": "A_avg (%)",
    "A_T": "A_T (%)",
    "forgetting": "forgetting (%)",
    "A_T_aware": "A_T, task given (%)",
    "A_T_unrouted": "A_T, all compete (%)",
    "routing": "task right (%)",
    "up_max_mib": "upload (MiB)",
    "adapt_up_mib": "first stage's upload (MiB)",
    "seconds_per_task": "seconds per task",
    "fedran_mib": "FedRAN's count (MiB)",
    "stsa_mib": "STSA's count (MiB)",
}
#: Shown only where a method defines it.
_OPTIONAL = ("A_T_aware", "A_T_unrouted", "routing", "adapt_up_mib", "fedran_mib", "stsa_mib")
NOTE = (
    "Mean ± standard deviation over n seeds. Upload: measured, of the busiest client and task. "
    f"In each setting the best accuracy is bold and the second underlined ({CEILING}, the ceiling, aside)."
)

#: Content and mark ("", "bold" or "underline") of one cell.
Cell = tuple[str, str]


def constants(summary: pd.DataFrame) -> list[str]:
    """What all rows share, in one line; then what the rows of each method share, in another."""
    methods = {method: _shared(rows, knobs(rows)) for method, rows in summary.groupby("method")}
    lines = [_shared(summary, setting(summary)), "; ".join(f"{name}: {told}" for name, told in methods.items() if told)]
    return [line for line in lines if line]


def cells(summary: pd.DataFrame) -> tuple[list[str], list[list[Cell]]]:
    """Headers and rows: the setting where it varies, the label, n, and the measures. No cell is empty or NaN."""
    varying = varying_setting(summary)
    measures = [m for m in _HEADERS if m not in _OPTIONAL or summary[f"{m}_mean"].notna().any()]
    marks = {measure: _marks(summary, measure) for measure in ("A_avg", "A_T")}
    rows: list[list[Cell]] = []
    for index, row in summary.iterrows():
        rows.append([(text(row[column]) or "none", "") for column in varying])
        rows[-1] += [(row["label"], ""), (str(row["n"]), "")]
        rows[-1] += [(_value(row, m), marks.get(m, {}).get(index, "")) for m in measures]
    return [*varying, "method", "n", *(_HEADERS[measure] for measure in measures)], rows


def markdown(summary: pd.DataFrame) -> str:
    """The summary as a Markdown page."""
    headers, rows = cells(summary)
    texts = headers.index("n")
    around = {"": "{}", "bold": "**{}**", "underline": "<u>{}</u>"}
    lines = [headers, ["---"] * texts + ["---:"] * (len(headers) - texts)]
    lines += [[around[mark].format(content.replace("|", "\\|")) for content, mark in row] for row in rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([*constants(summary), table, NOTE]) + "\n"


def terminal_table(summary: pd.DataFrame, width: float) -> tuple[Table, list[str]]:
    """The summary for rich, a line between settings; and the last columns, left out to keep it within `width`."""
    headers, rows = cells(summary)
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


def _shared(rows: pd.DataFrame, columns: list[str]) -> str:
    """The columns with one value in all rows, less what is null, absent or a mere fingerprint."""
    values = {column: set(rows[column].map(text)) for column in columns if "fingerprint" not in column}
    told = {column: min(value) for column, value in values.items() if len(value) == 1 and column != "features"}
    return ", ".join(f"{c.removeprefix('method.')} {v}" for c, v in told.items() if v not in ("", "null"))


def _value(row: pd.Series, measure: str) -> str:
    """Percents with two decimals; small sizes and times with three digits that count."""
    mean, std = row[f"{measure}_mean"], row[f"{measure}_std"]
    if math.isnan(mean):
        return "not defined"
    decimals = 2
    if measure not in ("A_avg", "A_T", "forgetting") and 0 < mean < 1:
        decimals -= math.floor(math.log10(mean))
    # An exact zero is not one that was rounded: sizes often are the same for every seed.
    spread = "" if math.isnan(std) else " ± 0" if std == 0 else f" ± {std:.{decimals}f}"
    return f"{mean:.{decimals}f}{spread}"


def _marks(summary: pd.DataFrame, measure: str) -> dict[int, str]:
    """Row -> mark of the best and the second of each setting; values that print alike are marked alike."""
    marks: dict[int, str] = {}
    printed = summary.loc[summary["method"] != CEILING, f"{measure}_mean"].dropna().round(2)
    for _, values in printed.groupby(signature(summary, setting(summary))):
        best = sorted(set(values), reverse=True)[:2] if len(values) > 1 else []
        for value, mark in zip(best, ("bold", "underline"), strict=False):
            marks |= dict.fromkeys(values.index[values == value], mark)
    return marks
