"""Markdown pages as text without code, their tables, and the numbers that have to be claimed or exempt."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fcl_bench.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
#: A number as pages print it: 44,986, 73.76, .164, 2e-5, -0.10.
NUMBER = r"(?<![\w.,-])-?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:e-?\d+)?(?!\w|\.\d|,\d{3})"
#: What no reader takes for a measurement: code, the targets of links, comments.
_CODE = r"`[^`\n]*`|\]\([^)\n]*\)|<!--.*?-->|<https?:[^>\n]*>"


@dataclass(frozen=True)
class Span:
    """A stretch of a page's text, by offsets."""

    start: int
    end: int

    def within(self, other: Span) -> bool:
        return other.start <= self.start and self.end <= other.end


@dataclass(frozen=True)
class Row:
    """A row of a table: its cells, and where each stands."""

    cells: list[str]
    spans: list[Span]

    def starts_with(self, label: str) -> bool:
        """Whether the row's first cells, joined with ` | `, are `label`."""
        joined = " | ".join(self.cells)
        return joined == label or joined.startswith(f"{label} |")


@dataclass(frozen=True)
class Table:
    heading: str
    rows: list[Row]


class Page:
    """A page of the repository, read once."""

    def __init__(self, name: str, text: str | None = None) -> None:
        self.name = name
        self.text = (REPOSITORY / name).read_text() if text is None else text

    def line(self, offset: int) -> int:
        return self.text.count("\n", 0, offset) + 1

    @cached_property
    def plain(self) -> str:
        """The text with code, link targets and comments blanked, at the same offsets."""
        lines, fenced = [], False
        for line in self.text.splitlines(keepends=True):
            fence = line.startswith("```")
            hidden = fenced or fence or line.startswith("    ")
            fenced ^= fence
            lines.append(" " * (len(line) - 1) + "\n" if hidden else line)
        return re.sub(_CODE, lambda found: re.sub(r"[^\n]", " ", found[0]), "".join(lines), flags=re.S)

    @cached_property
    def tables(self) -> list[Table]:
        """All tables, each with the heading above it; their header and rule are left out."""
        found: list[Table] = []
        heading, offset, count = "", 0, 0
        for line, plain in zip(self.text.splitlines(keepends=True), self.plain.splitlines(), strict=True):
            if plain.startswith("#"):
                heading = line.strip("# \n")
            count = count + 1 if plain.startswith("|") else 0
            if count == 1:
                found.append(Table(heading, []))
            elif count > 2:
                found[-1].rows.append(_row(line, offset))
            offset += len(line)
        return found

    def table(self, under: str, number: int = 1) -> Table:
        """The `number`-th table under a heading. Raises a `UserError` if there is none."""
        tables = [table for table in self.tables if table.heading == under]
        if len(tables) < number:
            raise UserError(f"{self.name} has {len(tables)} tables under {under!r}", "name another heading or number")
        return tables[number - 1]

    def place(self, quoted: str) -> list[Span]:
        """Where the numbers of `quoted` stand, which is a piece of the page with {} for each; line breaks are spaces.

        A piece without {} is returned as a whole.

        Raises:
            UserError: the piece is not on the page, or more than once.
        """
        words = re.escape(" ".join(quoted.split())).replace(r"\{\}", f"({NUMBER})").replace(r"\ ", r"\s+")
        found = list(re.finditer(words, self.text))
        if len(found) != 1:
            raise UserError(f"{self.name} has {quoted!r} {len(found)} times", "quote a piece that is there once")
        groups = range(1, found[0].re.groups + 1) or [0]
        return [Span(*found[0].span(group)) for group in groups]

    def candidates(self) -> Iterator[Span]:
        """Numbers that look measured: a decimal point, a percentage; and all in a column of numbers that has such."""
        told = [Span(*found.span()) for found in re.finditer(NUMBER, self.plain)]
        columns = [_column(table, index) for table in self.tables for index in range(1, _width(table))]
        marked = [span for span in told if self._marked(span)]
        columns = [column for column in columns if self._of_numbers(column)]
        measured = [column for column in columns if any(one.within(cell) for one in marked for cell in column)]
        inside = [cell for column in measured for cell in column]
        yield from (span for span in told if span in marked or any(span.within(cell) for cell in inside))

    def _of_numbers(self, column: list[Span]) -> bool:
        """Whether half of a column's cells that hold something begin with a number."""
        cells = [cell for cell in (self.plain[one.start : one.end].strip(" *") for one in column) if cell]
        return 2 * sum(bool(re.match(NUMBER, cell)) for cell in cells) >= max(len(cells), 1)

    def _marked(self, span: Span) -> bool:
        return "." in self.plain[span.start : span.end] or bool(re.match(r"\s?%", self.plain[span.end :]))


def _row(line: str, offset: int) -> Row:
    """Cells end at bars that no backslash escapes."""
    bars = [found.start() for found in re.finditer(r"(?<!\\)\|", line)]
    pairs = list(itertools.pairwise(bars))
    cells = [line[left + 1 : right].strip() for left, right in pairs]
    return Row(cells, [Span(offset + left + 1, offset + right) for left, right in pairs])


def _width(table: Table) -> int:
    return max((len(row.cells) for row in table.rows), default=0)


def _column(table: Table, index: int) -> list[Span]:
    return [row.spans[index] for row in table.rows if index < len(row.spans)]
