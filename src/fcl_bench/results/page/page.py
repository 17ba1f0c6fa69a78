"""One HTML page of tables and figures that opens from disk: nothing in it is fetched from anywhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from fcl_bench.results.tables.cells import Cell, Sheet


def html_page(title: str, tables: Mapping[str, Sheet], figures: Mapping[str, bytes]) -> str:
    """The page as text, with its style, script and pictures inside, and a policy that forbids everything else.

    Tables sort by a click (or Enter) on a header: up, down, as given; what is absent stays last. A field below each
    header filters its column, one at the top all tables: every word must be there; `>70` or `<=3` compares numbers. A
    column is one of numbers if each of its cells has one or is absent. Columns with one value in all rows stand below
    the table instead.

    Args:
        title: of the page.
        tables: name -> table.
        figures: name -> SVG.
    """
    here = files(__package__)
    html, style, script = (here.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    return environment.from_string(html).render(
        title=title,
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        style=style,
        script=script,
        tables=[
            {"id": f"table-{i}", "heading": _heading(name), **_table(sheet)}
            for i, (name, sheet) in enumerate(tables.items(), 1)
        ],
        figures=[
            {"id": f"figure-{i}", "heading": _heading(name), "data": base64.b64encode(svg).decode()}
            for i, (name, svg) in enumerate(figures.items(), 1)
        ],
    )


def _table(sheet: Sheet) -> dict[str, object]:
    columns = [[row[position] for row in sheet.rows] for position in range(len(sheet.headers))]
    # A table of a single row is all the same, and still a table.
    same = [len(column) > 1 and len({(cell.text, cell.mark) for cell in column}) == 1 for column in columns]
    numeric = [_is_numeric(column) for column in columns]
    shown = [position for position in range(len(columns)) if not same[position]]
    return {
        "columns": [{"header": sheet.headers[position], "is_numeric": numeric[position]} for position in shown],
        "rows": [[_cell(row[position], numeric[position]) for position in shown] for row in sheet.rows],
        "same": "; ".join(f"{sheet.headers[p]} {columns[p][0].text}" for p in range(len(columns)) if same[p]),
        "notes": [line for note in sheet.notes for line in note.splitlines() if line.strip()],
    }


def _is_numeric(column: list[Cell]) -> bool:
    there = [cell for cell in column if not cell.absent]
    return bool(there) and all(cell.number is not None for cell in there)


def _cell(cell: Cell, is_numeric: bool) -> dict[str, object]:
    classes = " ".join(["number"] * is_numeric + ["absent"] * cell.absent)
    # In a column with words, numbers are sorted as words.
    attributes = {"class": classes or None, "data-number": cell.number if is_numeric else None}
    return {"text": cell.text, "mark": cell.mark, "attributes": attributes}


def _heading(name: str) -> str:
    words = name.replace("_", " ").strip()
    return words[:1].upper() + words[1:]
