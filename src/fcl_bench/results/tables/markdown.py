"""Tables as Markdown that a repository's viewer renders."""

from __future__ import annotations

import re

import pandas as pd

from fcl_bench.results.tables.cells import Sheet

_AROUND = {"": "{}", "bold": "**{}**", "underline": "<u>{}</u>"}


def markdown_table(sheet: Sheet) -> str:
    """The table alone, its numbers set to the right."""
    lines = [[escaped(header) for header in sheet.headers]]
    lines.append(["---"] * sheet.texts + ["---:"] * (len(sheet.headers) - sheet.texts))
    lines += [[_AROUND[mark].format(escaped(content)) for content, mark in row] for row in sheet.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def marked_frame(sheet: Sheet) -> pd.DataFrame:
    """The cells as texts with their marks, as the HTML page takes them; nothing is escaped."""
    rows = [[_AROUND[mark].format(content) for content, mark in row] for row in sheet.rows]
    return pd.DataFrame(rows, columns=sheet.headers)


def markdown_page(sheet: Sheet) -> str:
    """Title, table and notes."""
    return "\n\n".join([f"# {escaped(sheet.title)}", markdown_table(sheet), *map(escaped, sheet.notes)]) + "\n"


def escaped(text: str) -> str:
    """`text` so that it is shown as it is, in a cell or a paragraph; underscores within words need nothing."""
    plain = " ".join(re.sub(r"([\\`*|\[\]])", r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;").split())
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", plain)
