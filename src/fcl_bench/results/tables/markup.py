r"""Writes a `Sheet` as Markdown that a repository's viewer renders, and as LaTeX for \input."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fcl_bench.files import csv_cell
from fcl_bench.results.tables.cells import ABSENT, Sheet, Table

if TYPE_CHECKING:
    import pandas as pd

_MARKDOWN = {"": "{}", "bold": "**{}**"}
#: Marks in the form that the Styler expects: the macro goes around the cell.
_LATEX = {"": "", "bold": "textbf:--rwrap;"}
_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "`": r"\textasciigrave{}",
    # After a row's end, TeX would read these as a star or an optional argument.
    "*": "{*}",
    "[": "{[}",
    "]": "{]}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": "$-$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
}
#: LaTeX tables with more rows break over pages.
_PAGE = 45


def markdown_page(sheet: Sheet) -> str:
    """Return title, table with right-aligned numbers, and notes as Markdown."""
    lines = [[_markdown(header) for header in sheet.headers]]
    lines.append(["---"] * sheet.texts + ["---:"] * (len(sheet.headers) - sheet.texts))
    lines += [[_MARKDOWN[cell.mark].format(_markdown(cell.text)) for cell in row] for row in sheet.rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([f"# {_markdown(sheet.title)}", table, *map(_markdown, sheet.notes)]) + "\n"


def latex_table(sheet: Sheet) -> str:
    """Return a tabular with booktabs' rules, or a longtable if it is longer than a page; notes become comments."""
    import pandas as pd

    is_long = len(sheet.rows) > _PAGE
    columns = range(len(sheet.headers))
    # Columns are numbered, since two headers may be equal, which the Styler refuses.
    cells = pd.DataFrame([[latex_text(cell.text) for cell in row] for row in sheet.rows], columns=columns, dtype=object)
    marks = pd.DataFrame([[_LATEX[cell.mark] for cell in row] for row in sheet.rows], columns=columns, dtype=object)
    body = (
        cells.style.apply(lambda _: marks, axis=None)
        .hide(axis="index")
        .format_index(lambda position: latex_text(sheet.headers[position]), axis="columns")
        .to_latex(
            column_format="l" * sheet.texts + "r" * (len(sheet.headers) - sheet.texts),
            environment="longtable" if is_long else None,
            hrules=True,
        )
    )
    lines = [
        f"% {_one_line(sheet.title)}",
        r"% Needs, in the preamble: \usepackage{booktabs}" + (r" \usepackage{longtable}" if is_long else ""),
        body.rstrip(),
        *(f"% {_one_line(note)}" for note in sheet.notes),
    ]
    return "\n".join(lines) + "\n"


def table_files(table: Table, formats: Iterable[str]) -> dict[str, str]:
    """Return suffix -> content of a table's files: those of `formats` (csv, md, tex), and the runs behind its cells."""
    forms = {
        "csv": _csv(table.values),
        "md": markdown_page(table.sheet),
        "tex": latex_table(table.sheet),
    }
    chosen = {suffix: forms[suffix] for suffix in forms if suffix in formats}
    return {**chosen, "runs.csv": _csv(table.runs)}


def _csv(frame: pd.DataFrame) -> str:
    texts = frame.select_dtypes(exclude="number").columns
    safe = frame.assign(**{str(name): frame[name].map(_csv_cell) for name in texts})
    return safe.rename(columns=csv_cell).to_csv(index=False)


def _csv_cell(value: Any) -> Any:
    """Like `csv_cell`, but words in place of a value stay as they are, so that `read_csv` finds those of `ABSENT`."""
    return value if isinstance(value, str) and value in ABSENT else csv_cell(value)


def _markdown(text: str) -> str:
    """Escape `text` for a Markdown cell or paragraph; underscores within words need no escape."""
    plain = _one_line(re.sub(r"([\\`*|\[\]])", r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;"))
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", plain)


def latex_text(text: str) -> str:
    """Escape `text` for LaTeX."""
    plain = re.sub("|".join(map(re.escape, _LATEX_ESCAPES)), lambda found: _LATEX_ESCAPES[found[0]], _one_line(text))
    # TeX would turn two hyphens into a dash.
    return re.sub("-(?=-)", "-{}", plain)


def _one_line(text: str) -> str:
    return " ".join(text.split())
