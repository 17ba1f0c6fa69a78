"""A page as a parser sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

from fcl_bench.results.tables.cells import Cell, Sheet, value_cell

#: Elements without an end tag.
_VOID = {"meta", "input", "img", "br", "link"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    inside: list[Element | str] = field(default_factory=list)

    def all(self, tag: str) -> list[Element]:
        children = [child for child in self.inside if isinstance(child, Element)]
        return [found for child in children for found in ([child] * (child.tag == tag) + child.all(tag))]

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.inside)


class _Builder(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.stack = [Element("", {})]

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), (tag, names)
        element = Element(tag, dict(attrs))
        self.stack[-1].inside.append(element)
        if tag not in _VOID:
            self.stack.append(element)

    def handle_endtag(self, tag):
        assert self.stack.pop().tag == tag

    def handle_data(self, data):
        self.stack[-1].inside.append(data)


def parsed(page: str) -> Element:
    """The root; every element is closed, in order, and has no attribute twice."""
    builder = _Builder()
    builder.feed(page)
    builder.close()
    assert len(builder.stack) == 1
    return builder.stack[0]


def table(root: Element, position: int = 0) -> tuple[list[str], list[list[Element]]]:
    """Headers, and the cells of each row, of the n-th table."""
    found = root.all("table")[position]
    return [cell.text for cell in found.all("th")], [row.all("td") for row in found.all("tbody")[0].all("tr")]


def sheet(columns: dict[str, list], *notes: str) -> Sheet:
    """A table of columns of cells, or of plain values."""
    rows = zip(*columns.values(), strict=True)
    cells = [[value if isinstance(value, Cell) else value_cell(value) for value in row] for row in rows]
    return Sheet("A title", list(columns), cells, 1, list(notes))
