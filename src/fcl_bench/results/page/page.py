"""One HTML page of tables and figures that opens from disk: nothing in it is fetched from anywhere."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import Any

import pandas as pd

from fcl_bench.config import is_number, text
from fcl_bench.results.tables.cells import ABSENT
from fcl_bench.results.tables.paper_tables import NO_METHOD

#: What stands where there is no value.
_NO_VALUE = "–"
#: Characters that are shown without being asked for.
_SHORT = 300
#: A number, and what may follow it in a cell that is one: a spread, a sample count, a unit in percent.
_LEADING_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?:\s*(?:±|\(|%).*)?")
_BOLD, _UNDERLINED = re.compile(r"\*\*(.+)\*\*", re.DOTALL), re.compile(r"<u>(.+)</u>", re.DOTALL)


def html_page(title: str, tables: dict[str, pd.DataFrame], figures: dict[str, str], notes: dict[str, str]) -> str:
    """The page as text, with its style, script and pictures inside, and a policy that forbids everything else.

    Tables sort by a click (or Enter) on a header: up, down, as given; what has no value stays last. A field below each
    header filters its column, one at the top all tables: every word must be there; `>70` or `<=3` compares numbers. A
    column is one of numbers if all its values are numbers or texts that begin with one ("72.00 ± 0.34"). Columns with
    one value in all rows stand below the table instead. As in Markdown, a text in ** is bold and in <u> underlined.

    Args:
        title: of the page.
        tables: name -> table; its index is not shown.
        figures: name -> SVG text.
        notes: name of a table or figure -> what stands below it, a line a paragraph; other keys: at the page's top.
    """
    tops = [note for name, note in notes.items() if name not in tables and name not in figures]
    sections = [_table(f"table-{i}", *item, notes) for i, item in enumerate(tables.items(), 1)]
    sections += [_figure(f"figure-{i}", *item, notes) for i, item in enumerate(figures.items(), 1)]
    ids = [f"table-{i}" for i in range(1, len(tables) + 1)] + [f"figure-{i}" for i in range(1, len(figures) + 1)]
    links = "\n".join(
        f'<li><a href="#{id_}">{escape(_heading(name))}</a></li>'
        for id_, name in zip(ids, [*tables, *figures], strict=True)
    )
    here = files(__package__)
    style, script = (here.joinpath(f"page.{suffix}").read_text(encoding="utf-8") for suffix in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{_paragraphs(tops)}
<nav aria-label="Contents"><ul>
{links}
</ul></nav>
<div class="tools" id="search" hidden>
<label for="everywhere">Search all tables
<input type="search" id="everywhere" placeholder="words that a row must have"></label>
</div>
</header>
<main>
{"".join(sections)}</main>
<script>{script}</script>
</body>
</html>
"""


def _table(id_: str, name: str, table: pd.DataFrame, notes: dict[str, str]) -> str:
    headers = [" / ".join(map(str, column)) if isinstance(column, tuple) else str(column) for column in table.columns]
    columns = [[_content(value) for value in table.iloc[:, position]] for position in range(len(headers))]
    # A table of a single row is all the same, and still a table.
    same = [len(table) > 1 and len(set(column)) == 1 for column in columns]
    numeric = [_is_numeric(column) for column in columns]
    shown = [position for position in range(len(headers)) if not same[position]]
    kinds = {position: ' class="number"' if numeric[position] else "" for position in shown}
    head = "".join(f'<th scope="col"{kinds[position]}>{escape(headers[position])}</th>' for position in shown)
    body = "\n".join(
        f"<tr>{''.join(_cell(columns[position][row], numeric[position]) for position in shown)}</tr>"
        for row in range(len(table))
    )
    constant = "; ".join(f"{headers[p]} {columns[p][0]}" for p in range(len(headers)) if same[p])
    heading = escape(_heading(name))
    return f"""<section id="{id_}" aria-labelledby="{id_}-heading">
<h2 id="{id_}-heading">{heading}</h2>
<div class="tools"></div>
<div class="scroll" role="region" tabindex="0" aria-labelledby="{id_}-heading">
<table>
<caption>{heading}</caption>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
</div>
{_same(constant)}{_paragraphs([notes.get(name, "")])}
</section>
"""


def _figure(id_: str, name: str, svg: str, notes: dict[str, str]) -> str:
    # As a picture of its own: ids and styles inside do not meet those of other figures, and no script in it would run.
    data = base64.b64encode(svg.encode()).decode()
    heading, note = escape(_heading(name)), notes.get(name, "")
    return f"""<section id="{id_}" aria-labelledby="{id_}-heading">
<h2 id="{id_}-heading">{heading}</h2>
<figure>
<div class="scroll" role="region" tabindex="0" aria-labelledby="{id_}-heading">
<img alt="{heading}. {escape(note)}" src="data:image/svg+xml;base64,{data}">
</div>
<figcaption>{_paragraphs([note])}</figcaption>
</figure>
</section>
"""


def _same(constant: str) -> str:
    if not constant:
        return ""
    # A summary has dozens of such columns, which are for who looks for them; a table for print has a few.
    state = " open" if len(constant) <= _SHORT else ""
    return f'<details class="same"{state}><summary>The same in every row</summary>{escape(constant)}</details>\n'


def _paragraphs(notes: Iterable[str]) -> str:
    lines = [line for note in notes for line in note.splitlines() if line.strip()]
    return "\n".join(f'<p class="note">{escape(line)}</p>' for line in lines)


def _heading(name: str) -> str:
    words = name.replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def _content(value: Any) -> str:
    """A value as a cell shows it; numbers keep the digits that a reader compares."""
    if isinstance(value, list | tuple | set):
        return " ".join(map(str, value)) or _NO_VALUE
    if is_number(value):
        return text(value) if float(value).is_integer() else f"{float(value):.6g}"
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    return text(value) or _NO_VALUE


def _number(content: str) -> str | None:
    """The number that a cell is, as JavaScript reads it; None for other texts."""
    found = _LEADING_NUMBER.fullmatch(_unmarked(content)[0].strip())
    return repr(float(found[1])) if found and math.isfinite(float(found[1])) else None


def _unmarked(content: str) -> tuple[str, str]:
    """The text and the tag that its mark asks for: "", strong or u."""
    for pattern, tag in ((_BOLD, "strong"), (_UNDERLINED, "u")):
        found = pattern.fullmatch(content)
        if found:
            return found[1], tag
    return content, ""


def _is_absent(content: str) -> bool:
    return content in (_NO_VALUE, NO_METHOD, *ABSENT)


def _is_numeric(column: list[str]) -> bool:
    there = [content for content in column if not _is_absent(content)]
    return bool(there) and all(_number(content) is not None for content in there)


def _cell(content: str, is_numeric: bool) -> str:
    classes = " ".join(["number"] * is_numeric + ["absent"] * _is_absent(content))
    about = f' class="{classes}"' if classes else ""
    if is_numeric and not _is_absent(content):
        about += f' data-number="{_number(content)}"'
    words, tag = _unmarked(content)
    shown = escape(words)
    return f"<td{about}>{f'<{tag}>{shown}</{tag}>' if tag else shown}</td>"
