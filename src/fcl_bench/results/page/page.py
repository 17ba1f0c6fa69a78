"""One HTML page of tables and figures that opens from disk, with a policy that forbids all else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from fcl_bench.results.tables.cells import Cell, Sheet


def asset(name: str, package: str = __package__) -> str:
    """Return the text of a file of a package: by default, of what pages share."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def as_json(value: object) -> str:
    """Return a value as JSON for a script element, which only "<" could end; NaN is refused."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def document(html: str, scripts: Sequence[str], **values: Any) -> str:
    """Return a template filled with `values`, `scripts` and `policy`, which lets these scripts run and no others."""
    digests = (base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    return environment.from_string(html).render(scripts=scripts, policy=policy, **values)


def html_page(
    title: str,
    tables: Mapping[str, Sheet],
    figures: Mapping[str, bytes],
    captions: Mapping[str, str] | None = None,
    about: str = "",
) -> str:
    """Return the page as text, with its styles, scripts and pictures inside, and a policy that forbids all else.

    A click (or Enter) on a header sorts the table: ascending, descending, as given; absent values stay last. A field
    below each header filters its column, and one at the top filters all tables: every word must occur; `>70` or `<=3`
    compares numbers. A column is numeric if each of its cells has a number or is absent. Columns with one value in all
    rows are listed below the table instead. The method's column comes first and stays visible; the columns of the
    setting are merged into one, and choices above all tables select some of its values.

    Args:
        title: the title of the page.
        tables: name -> table.
        figures: name -> SVG.
        captions: name of a figure -> its caption.
        about: a line below the title: which runs, of when, and the command.
    """
    return document(
        asset("page.html"),
        [asset("page.js")],
        title=title,
        about=about,
        style=asset("look.css") + asset("page.css"),
        tables=[
            {"id": f"table-{i}", "heading": _heading(name), **_table(sheet), "notes": own}
            for i, ((name, sheet), own) in enumerate(zip(tables.items(), _notes(tables.values()), strict=True), 1)
        ],
        figures=[
            {
                "id": f"figure-{i}",
                "heading": _heading(name),
                "data": base64.b64encode(svg).decode(),
                "caption": (captions or {}).get(name, ""),
            }
            for i, (name, svg) in enumerate(figures.items(), 1)
        ],
    )


def _table(sheet: Sheet) -> dict[str, object]:
    columns = [[row[position] for row in sheet.rows] for position in range(len(sheet.headers))]
    # All columns of a single row have one value, but it still is a table.
    same = [len(column) > 1 and len({(cell.text, cell.mark) for cell in column}) == 1 for column in columns]
    numeric = [_is_numeric(column) for column in columns]
    facets = [position for position in sheet.facets if not same[position]]
    shown = [position for position in range(len(columns)) if not same[position] and position not in facets]
    heads = [{"header": sheet.headers[position], "is_numeric": numeric[position]} for position in shown]
    settings = [{sheet.headers[p]: row[p].text for p in facets} for row in sheet.rows]
    rows = [[_cell(row[position], numeric[position]) for position in shown] for row in sheet.rows]
    if facets:
        heads.insert(1, {"header": "setting", "is_numeric": False})
        for row, setting in zip(rows, settings, strict=True):
            row.insert(1, {"text": "", "mark": "", "attributes": {"class": "setting"}, "parts": setting})
    return {
        "columns": heads,
        "rows": [
            {"cells": cells, "setting": json.dumps(setting) if facets else None}
            for cells, setting in zip(rows, settings, strict=True)
        ],
        "same": "; ".join(f"{sheet.headers[p]} {columns[p][0].text}" for p in range(len(columns)) if same[p]),
    }


def _notes(sheets: Iterable[Sheet]) -> list[list[str]]:
    """Return the lines below each table, without those that stand below an earlier one."""
    found: list[list[str]] = []
    for sheet in sheets:
        lines = [line for note in sheet.notes for line in note.splitlines() if line.strip()]
        found.append([line for line in lines if not any(line in earlier for earlier in found)])
    return found


def _is_numeric(column: list[Cell]) -> bool:
    there = [cell for cell in column if not cell.absent]
    return bool(there) and all(cell.number is not None for cell in there)


def _cell(cell: Cell, is_numeric: bool) -> dict[str, object]:
    classes = " ".join(["number"] * is_numeric + ["absent"] * cell.absent)
    # Numbers in a column with words are sorted as words.
    attributes = {"class": classes or None, "data-number": cell.number if is_numeric else None}
    attributes["title"] = cell.title or None
    return {"text": cell.text, "mark": cell.mark, "attributes": attributes, "parts": {}}


def _heading(name: str) -> str:
    words = name.replace("_", " ").strip()
    return words[:1].upper() + words[1:]
