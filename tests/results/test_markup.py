"""Markdown and LaTeX of any content: real parsers read back the cells that were written."""

from __future__ import annotations

import itertools
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from pylatexenc.latex2text import LatexNodes2Text
from pylatexenc.latexwalker import LatexEnvironmentNode, LatexMacroNode, LatexWalker

from fcl_bench.results.tables.cells import Cell, Sheet
from fcl_bench.results.tables.markup import latex_table, markdown_page

NASTY = ["a|b", "50 % & more", "[5]", "< 3", "> 10", "A_avg_tasks", "~^{}$#\\", "*not bold*", "`x`", "-", "1 ± 0.2 (3)"]
CONTENT = st.sampled_from(NASTY) | st.text(st.sampled_from("ab1 .,_%&#$\\{}[]<>|*`~^±×-"), min_size=1).filter(str.strip)
MARK = st.sampled_from(["", "bold"])


@st.composite
def sheets(draw):
    width = draw(st.integers(1, 4))
    headers = draw(st.lists(CONTENT, min_size=width, max_size=width))
    rows = draw(st.lists(st.lists(st.builds(Cell, CONTENT, MARK), min_size=width, max_size=width), max_size=3))
    return Sheet("A title", headers, rows, draw(st.integers(0, width)), ["A note about A_avg."])


def one_line(text: str) -> str:
    return " ".join(text.split())


def markdown_cells(page: str) -> list[list[str]]:
    """Rows of the only table, the text of each cell as a reader sees it."""
    rows: list[list[str]] = []
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    for token, inline in itertools.pairwise(tokens):
        if token.type == "tr_open":
            rows.append([])
        if token.type in ("th_open", "td_open"):
            kinds = ("text", "text_special", "code_inline")
            rows[-1].append("".join(child.content for child in inline.children if child.type in kinds))
    return rows


@settings(max_examples=60, deadline=None)
@given(sheets())
def test_markdown_renders_as_the_cells_that_were_written(sheet):
    rows = markdown_cells(markdown_page(sheet))
    assert rows == [
        [one_line(h) for h in sheet.headers],
        *([one_line(cell.text) for cell in row] for row in sheet.rows),
    ]


def test_marks_are_bold_in_markdown():
    page = markdown_page(Sheet("t", ["m", "a"], [[Cell("x"), Cell("1", "bold")], [Cell("y"), Cell("2")]], 1))
    html = MarkdownIt("commonmark").enable("table").render(page)
    assert "<strong>1</strong>" in html
    assert html.count("<strong>") == 1
    assert 'style="text-align:right"' in html


def latex_cells(source: str) -> tuple[str, list[list[str]]]:
    """Name of the only environment, and its rows as text; strictly parsed."""
    nodes, _, _ = LatexWalker(source, tolerant_parsing=False).get_latex_nodes()
    [environment] = [node for node in nodes if isinstance(node, LatexEnvironmentNode)]
    rows: list[list[list]] = [[[]]]
    rules = {"toprule", "midrule", "bottomrule", "endfirsthead", "endhead", "endfoot", "endlastfoot"}
    for node in environment.nodelist:
        if isinstance(node, LatexMacroNode) and node.macroname == "\\":
            rows.append([[]])
        elif node.isNodeType(LatexEnvironmentNode) or not (
            isinstance(node, LatexMacroNode) and node.macroname in rules
        ):
            if getattr(node, "specials_chars", "") == "&":
                rows[-1].append([])
            else:
                rows[-1][-1].append(node)
    text = LatexNodes2Text(math_mode="text", strict_latex_spaces=True)
    read = [["".join(text.nodelist_to_text([node]) for node in cell).strip() for cell in row] for row in rows]
    return environment.environmentname, [row for row in read if row != [""]]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(sheets())
def test_latex_parses_to_the_cells_that_were_written(sheet):
    environment, rows = latex_cells(latex_table(sheet))
    assert environment == "tabular"
    plain = [[one_line(h) for h in sheet.headers], *([one_line(cell.text) for cell in row] for row in sheet.rows)]
    # The parser has another character for a circumflex.
    assert [[one_line(cell).replace("ˆ", "^") for cell in row] for row in rows] == plain


def test_a_long_table_breaks_over_pages():
    sheet = Sheet("t", ["a", "b"], [[Cell(str(i)), Cell("1.0")] for i in range(60)], 1)
    source = latex_table(sheet)
    environment, rows = latex_cells(source)
    assert environment == "longtable"
    # The headers stand on the first page and on every later one, and each page but the last says that more follows.
    assert rows[1] == ["a", "b"]
    assert rows[0][1] == "b"
    assert "Continued on next page" in rows[2][0]
    assert rows[3:] == [[str(i), "1.0"] for i in range(60)]
    assert r"\usepackage{longtable}" in source.splitlines()[1]


@pytest.mark.parametrize("rows", [len(NASTY), 60])
def test_latex_compiles_where_there_is_a_tex(rows, tmp_path):
    programs = [name for name in ("pdflatex", "tectonic", "lualatex", "xelatex") if shutil.which(name)]
    if not programs:
        pytest.skip("no TeX on this machine; the tables are parsed instead")
    cells = [[Cell(NASTY[i % len(NASTY)]), Cell("1.00 ± 0.20 (3)", "bold")] for i in range(rows)]
    (tmp_path / "table.tex").write_text(latex_table(Sheet("t", ["50 %", "A_avg"], cells, 1)))
    head = r"\documentclass{article}\usepackage{booktabs}\usepackage{longtable}"
    page = head + r"\begin{document}\input{table}\end{document}"
    (tmp_path / "page.tex").write_text(page)
    line = [programs[0], "page.tex"] if programs[0] == "tectonic" else [programs[0], "-halt-on-error", "page.tex"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "page.pdf").stat().st_size > 1000
