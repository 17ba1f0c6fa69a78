"""Writes a table's files: Markdown that a repository's viewer renders, LaTeX, and CSV."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fcl_bench.files import csv_cell
from fcl_bench.results.tables.cells import ABSENT, Sheet, Table
from fcl_bench.results.tables.latex import bibliography, latex_table, one_line

if TYPE_CHECKING:
    import pandas as pd

_MARKDOWN = {"": "{}", "bold": "**{}**"}


def markdown_page(sheet: Sheet) -> str:
    """Return title, table with right-aligned numbers, and notes as Markdown."""
    lines = [[_markdown(header) for header in sheet.headers]]
    lines.append(["---"] * sheet.texts + ["---:"] * (len(sheet.headers) - sheet.texts))
    lines += [[_MARKDOWN[cell.mark].format(_markdown(cell.text)) for cell in row] for row in sheet.rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([f"# {_markdown(sheet.title)}", table, *map(_markdown, sheet.notes)]) + "\n"


def table_files(table: Table, formats: Iterable[str]) -> dict[str, str]:
    """Return suffix -> text of the `formats` (csv, md, tex with a bib beside it) and of the runs behind the cells."""
    forms = {"csv": _csv(table.values), "md": markdown_page(table.sheet), "tex": latex_table(table.sheet)}
    chosen = {suffix: forms[suffix] for suffix in forms if suffix in formats}
    cited = bibliography(chosen.get("tex", ""))
    return {**chosen, **({"bib": cited} if cited else {}), "runs.csv": _csv(table.runs)}


def _csv(frame: pd.DataFrame) -> str:
    texts = frame.select_dtypes(exclude="number").columns
    safe = frame.assign(**{str(name): frame[name].map(_csv_cell) for name in texts})
    return safe.rename(columns=csv_cell).to_csv(index=False)


def _csv_cell(value: Any) -> Any:
    """Like `csv_cell`, but words in place of a value stay as they are, so that `read_csv` finds those of `ABSENT`."""
    return value if isinstance(value, str) and value in ABSENT else csv_cell(value)


def _markdown(text: str) -> str:
    """Escape `text` for a Markdown cell or paragraph; underscores within words need no escape."""
    plain = one_line(re.sub(r"([\\`*|\[\]])", r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;"))
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", plain)
