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

#: What the scripts of all pages use, before each page's own.
_SHARED_SCRIPTS = ("parts.js", "draw.js")


def _asset(name: str, package: str = __package__) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


def document(package: str, title: str, data: object = None, **values: Any) -> str:
    """Return a page: what all pages share, and page.html, page.css and page.js of a package, in one file.

    Its policy lets this script run and no other, and nothing is fetched.

    Args:
        package: the name of the package; its page.html extends shell.html.
        title: the title of the page.
        data: JSON-able, for the script; NaN is refused.
        values: what else page.html shows.
    """
    script = "".join([*map(_asset, _SHARED_SCRIPTS), _asset("page.js", package)])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    # Only "<" could end the element of the data.
    words = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return environment.from_string(_asset("page.html", package)).render(
        shell=environment.from_string(_asset("shell.html")),
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        style=_asset("look.css") + _asset("page.css", package),
        script=script,
        title=title,
        data=words if data else "",
        **values,
    )


def html_page(
    title: str,
    tables: Mapping[str, Sheet],
    figures: Mapping[str, tuple[bytes, str]],
    command: str = "",
    charts: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the page of a summary as text; docs/how-to/figures.md says what it shows and can do.

    A column is numeric if each of its cells has a number or is absent. Columns with one value in all rows are listed
    below the table instead, and those of the setting are merged into one after the first.

    Args:
        title: the title of the page.
        tables: name -> table.
        figures: name -> SVG and caption.
        command: what makes the page again.
        charts: what charts show beside the first table, as `chart_rows` returns it; none: no charts.
    """
    return document(
        __package__,
        title,
        charts,
        command=command,
        tables=[
            {"id": f"table-{i}", "heading": _heading(name), **_table(sheet), "notes": own}
            for i, ((name, sheet), own) in enumerate(zip(tables.items(), _notes(tables.values()), strict=True), 1)
        ],
        figures=[
            {"id": f"figure-{i}", "heading": _heading(name), "data": base64.b64encode(svg).decode(), "caption": caption}
            for i, (name, (svg, caption)) in enumerate(figures.items(), 1)
        ],
    )


def _table(sheet: Sheet) -> dict[str, object]:
    """Return the columns to show, those of them with numbers, each row's setting, and what is the same in every row."""
    columns = [[row[position] for row in sheet.rows] for position in range(len(sheet.headers))]
    # All columns of a single row have one value, but it still is a table.
    same = [len(column) > 1 and len({(cell.text, cell.mark) for cell in column}) == 1 for column in columns]
    facets = [position for position in sheet.facets if not same[position]]
    return {
        "sheet": sheet,
        "shown": [p for p in range(len(columns)) if not same[p] and p not in facets],
        "numeric": [p for p, column in enumerate(columns) if _is_numeric(column)],
        "settings": [{sheet.headers[p]: row[p].text for p in facets} for row in sheet.rows] if facets else [],
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


def _heading(name: str) -> str:
    words = name.replace("_", " ").strip()
    return words[:1].upper() + words[1:]
