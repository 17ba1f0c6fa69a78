"""What claims/*.yaml say of the numbers on pages, found on the pages; and the numbers of which they say nothing.

A file has the `page`, named `sources`, and `claims`. A claim is of a `text`, quoted with {} for each number, or of the
table `under` a heading: `rows` by first cells, `columns` by position. `is` says how the source gives each number:
`mean A_T`, or an expression of the functions in `sources.values` and of the page's `names` for conditions. `exempt`
instead says why a number is no measurement of ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.verify.pages import NUMBER, REPOSITORY, Page, Row, Span
from benchmarks.verify.sources import UNREAD, Source, where_of
from fcl_bench.config import YAML_LOADER
from fcl_bench.errors import UserError

CLAIMS = Path(__file__).parent / "claims"
#: Pages whose numbers are not claimed one by one, and why.
LEFT_OUT = {
    "docs/errata": "papers' numbers and counterexamples; the tests that the pages name have them",
    "docs/reference/experiments.md": "papers' settings, and what they leave open",
}
_SHORT = r"(mean|std|least|most|one) ([\w.]+)"
_ALL = "all"


@dataclass(frozen=True)
class Claim:
    """One number on a page, or a row of results/ (without `span`), and where it comes from.

    Attributes:
        where: the conditions on the source's rows.
        expression: gives the number; empty where nothing is compared.
        names: of the page's conditions, for expressions.
    """

    page: str
    line: int
    printed: str
    span: Span | None
    source: Source
    where: dict[str, str]
    expression: str
    names: dict[str, Any] = field(default_factory=dict)


@dataclass
class Claimed:
    """A page's claims, and the spans that are exempt."""

    page: Page
    claims: list[Claim] = field(default_factory=list)
    exempt: list[Span] = field(default_factory=list)

    def silent(self) -> list[str]:
        """The measured-looking numbers of which no claim and no exemption says anything, one line each."""
        general = [Span(*m.span()) for pattern in _general() for m in re.finditer(pattern, self.page.text)]
        known = [*(claim.span for claim in self.claims if claim.span), *self.exempt, *general]
        return [
            f"{self.page.name}:{self.page.line(span.start)}: {self.page.text[span.start : span.end]} has no command"
            for span in self.page.candidates()
            if not any(span.within(one) for one in known)
        ]


@cache
def _general() -> list[str]:
    return [one["pattern"] for one in _exempt()["patterns"]]


@cache
def _exempt() -> dict[str, Any]:
    return yaml.load((CLAIMS / "exempt.yaml").read_text(), Loader=YAML_LOADER)


def pages() -> list[str]:
    """The pages whose measured numbers need a claim, relative to the repository."""
    names = ["README.md", *(str(path.relative_to(REPOSITORY)) for path in sorted((REPOSITORY / "docs").rglob("*.md")))]
    return [name for name in names if not name.startswith(tuple(LEFT_OUT))]


def every() -> list[Claimed]:
    """Every page with its claims."""
    return [by_name(name) for name in pages()]


def by_name(name: str) -> Claimed:
    """One page with its claims."""
    return of_page(Page(name), told().get(name, {}))


@cache
def told() -> dict[str, dict[str, Any]]:
    """What the files say, by page. Raises a `UserError` if a file names no page or repeats one."""
    files = [yaml.load(path.read_text(), Loader=YAML_LOADER) for path in sorted(CLAIMS.glob("*.yaml"))]
    found = [file for file in files if "page" in file]
    named = [file["page"] for file in found]
    if wrong := sorted({name for name in named if name not in pages() or named.count(name) > 1}):
        raise UserError(f"claims name {wrong[0]}, which is no page or has two files", "one file for each page")
    return dict(zip(named, found, strict=True))


def of_page(page: Page, told: dict[str, Any]) -> Claimed:
    """The claims of one page.

    Raises:
        UserError: a piece of text, a table, a row or a command is not on the page, or a number has no expression.
    """
    claimed = Claimed(page)
    sources = {name: Source(source) for name, source in told.get("sources", {}).items()}
    for source in sources.values():
        _stands_on(page, source)
    pieces = _exempt()["pieces"].get(page.name, {})
    exempt = [{"text": text, "exempt": why} for why, texts in pieces.items() for text in texts]
    for entry in [*exempt, *told.get("claims", [])]:
        for span, where, expressions, source in _found(page, entry):
            spans = [Span(*m.span()) for m in re.compile(NUMBER).finditer(page.plain, span.start, span.end)]
            if "exempt" in entry:
                claimed.exempt += spans
                continue
            if source not in sources:
                raise UserError(f"{page.name} has no source {source}", f"one of {', '.join(sources)}")
            base = sources[source].told.get("where", "")
            where = where_of(base) | where_of(entry.get("where", "")) | where
            counted = sources[source].kind not in UNREAD
            if counted and len(spans) > len(expressions):
                raise UserError(f"{page.name}:{page.line(span.start)} has more numbers than `is`", "one each")
            for one, expression in zip(spans, expressions or [""] * len(spans), strict=False):
                printed = page.text[one.start : one.end]
                line, names = page.line(one.start), told.get("names", {})
                claimed.claims.append(Claim(page.name, line, printed, one, sources[source], where, expression, names))
    return claimed


def _found(page: Page, entry: dict[str, Any]) -> Iterator[tuple[Span, dict[str, str], list[str], str]]:
    """Yield each stretch of an entry, with its own conditions, its expressions and its source."""
    source = entry.get("source", "")
    if "text" in entry:
        spans, expressions = page.place(entry["text"]), _expressions(entry.get("is"))
        if expressions and len(expressions) != len(spans):
            raise UserError(f"{page.name}: {entry['text']!r} has {len(spans)} numbers", "as many entries in `is`")
        for index, span in enumerate(spans):
            yield span, {}, expressions[index : index + 1], source
        return
    table = page.table(entry["under"], entry.get("table", 1))
    rows: list[tuple[Row, Any]] = []
    for label, about in _labelled(entry.get("rows", _ALL)):
        same = [row for row in table.rows if label == _ALL or row.starts_with(label)]
        if not same or (label != _ALL and len(same) > 1):
            raise UserError(f"{page.name}: {len(same)} rows of {entry['under']!r} begin with {label}", "one row each")
        rows += [(row, about) for row in same]
    for row, about in rows:
        for index, column in _labelled(entry["columns"]):
            column = column if isinstance(column, dict) else {"is": column}
            own = about.get("columns", {}).get(index)  # of this row alone
            merged = {**about, **column, **({} if own is None else {"is": own})}
            where = where_of(about.get("where", "")) | where_of(column.get("where", ""))
            if int(index) < len(row.cells) + 1:
                yield row.spans[int(index) - 1], where, _expressions(merged.get("is")), merged.get("source", source)


def _labelled(told: Any) -> list[tuple[Any, Any]]:
    """`rows` and `columns` may be a mapping, a list of labels, or `all`."""
    if isinstance(told, dict):
        return [
            (key, {"where": value} if isinstance(value, str) and "=" in value else value or {})
            for key, value in told.items()
        ]
    return [(key, {}) for key in (told if isinstance(told, list) else [told])]


def _expressions(told: str | list[str] | None) -> list[str]:
    parts = told if isinstance(told, list) else re.split(r", (?=(?:mean|std|least|most|one) )", told) if told else []
    return [re.sub(rf"^{_SHORT}$", r"\1('\2')", str(part)) for part in parts]


def _stands_on(page: Page, source: Source) -> None:
    """Raise a `UserError` unless a reader finds the source's commands on the page, or on the one that it names."""
    where = Page(source.told["page"]) if "page" in source.told else page
    places = " ".join(where.text.split()), (REPOSITORY / "Makefile").read_text()
    for command in source.commands if source.kind not in ("stored", "arithmetic") else []:
        if source.kind == "test" and (REPOSITORY / command.split()[-1]).is_file():
            continue
        target = re.match(r"make ([\w-]+)", command)
        if " ".join(command.split()) not in places[0]:
            raise UserError(f"{where.name} has not the command {command}", "the page's own, or `page: PAGE`")
        if target and not re.search(rf"^{target[1]}:", places[1], flags=re.M):
            raise UserError(f"{where.name}: make has no target {target[1]}", "one of the Makefile's")
