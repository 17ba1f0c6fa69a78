"""Markdown and LaTeX of any content: real parsers read back the cells that were written."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from pylatexenc.latex2text import LatexNodes2Text
from pylatexenc.latexwalker import LatexEnvironmentNode, LatexMacroNode, LatexWalker

from fcl_bench.results.tables import markup
from fcl_bench.results.tables.cells import Cell, Sheet, Table
from fcl_bench.results.tables.markup import bibliography, latex_table, latex_text, markdown_page, table_files
from tests.small_methods import NAMES

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
    """Name of the innermost environment, and its rows as text; strictly parsed."""
    nodes, _, _ = LatexWalker(source, tolerant_parsing=False).get_latex_nodes()
    while inner := [node for node in nodes if isinstance(node, LatexEnvironmentNode)]:
        [environment] = inner
        nodes = environment.nodelist
    rows: list[list[list]] = [[[]]]
    rules = {"toprule", "midrule", "bottomrule", "endhead"}
    for node in environment.nodelist:
        if isinstance(node, LatexMacroNode) and node.macroname == "\\":
            rows.append([[]])
        elif not (isinstance(node, LatexMacroNode) and node.macroname in rules):
            if getattr(node, "specials_chars", "") == "&":
                rows[-1].append([])
            else:
                rows[-1][-1].append(node)
    text = LatexNodes2Text(math_mode="text", strict_latex_spaces=True)
    read = [["".join(text.nodelist_to_text([node]) for node in cell).strip() for cell in row] for row in rows]
    return environment.environmentname, [row for row in read if row != [""]]


def as_latex_has_it(text: str) -> str:
    """A number's deviation as siunitx reads it, and no number of seeds."""
    return re.sub(r"^([\d.]+) ± ([\d.]+) \(\d+\)$", r"\1 +- \2", one_line(text))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(sheets())
def test_latex_parses_to_the_cells_that_were_written(sheet):
    environment, rows = latex_cells(latex_table(sheet))
    assert environment == "tabular"
    texts = sheet.texts
    plain = [[one_line(h) for h in sheet.headers]]
    for row in sheet.rows:
        cells = [one_line(cell.text) for cell in row]
        plain.append([*cells[:texts], *map(as_latex_has_it, cells[texts:])])
    # The parser has another character for a circumflex.
    assert [[one_line(cell).replace("ˆ", "^") for cell in row] for row in rows] == plain


def paper_sheet() -> Sheet:
    rows = [
        [Cell("afl rank=2"), Cell("0.1"), Cell("2"), Cell("95.21 ± 0"), Cell("0.0161 ± 0.0002", "bold")],
        [Cell("fedavg [gate: chance]"), Cell("0.1"), Cell("3"), Cell("9.50"), Cell("not run", absent=True)],
        [Cell("of_my_own"), Cell("1"), Cell("3"), Cell("95.30 ± 1.00 [gate: rising]", "bold"), Cell("2.00")],
    ]
    return Sheet("Summary", ["method", "beta", "n", "A_avg (%)", "A_T (%)"], rows, 2, ["Note %"], facets=(1,))


def test_a_table_for_a_paper_has_names_symbols_groups_and_n_in_its_caption():
    source = latex_table(paper_sheet())
    lines = source.splitlines()
    assert lines[lines.index(r"\toprule") - 1] == r"\begin{tabular}{lSS}"
    assert lines[lines.index(r"\toprule") + 1] == r"method & {$\bar A$ (\%)} & {$A_T$ (\%)} \\"
    assert lines[lines.index(r"\toprule") + 2 : -3] == [
        r"\midrule",
        r"\multicolumn{3}{l}{\emph{beta 0.1}} \\",
        r"AFL~\cite{he2025}, rank=2 & 95.21 +- 0.00 & \bfseries 0.0161 +- 0.0002 \\",
        r"FedAvg~\cite{mcmahan2017}$^\dagger$ & 9.50 & {not run} \\",
        r"\midrule",
        r"\multicolumn{3}{l}{\emph{beta 1}} \\",
        r"of\_my\_own & \bfseries 95.30 +- 1.00 {$^\dagger$} & 2.00 \\",
        r"\bottomrule",
    ]
    [caption] = [line for line in lines if line.startswith(r"\caption")]
    assert r"Summary: mean $\pm$ standard deviation over 2 to 3 seeds." in caption
    assert r"$\dagger$: not a fair sample of the method (chance, rising)." in caption
    assert source.endswith("% Note %\n")
    assert latex_cells(source)[0] == "tabular"
    assert re.findall(r"@\w+\{(\w+),", bibliography(source)) == ["he2025", "mcmahan2017"]


def test_every_method_has_a_name_for_papers_and_what_it_cites_is_there():
    entries = (Path(markup.__file__).parent / "methods.bib").read_text()
    keys = re.findall(r"^@\w+\{(\w+),$", entries, re.M)
    assert len(keys) == len(set(keys))
    assert entries.count("{") == entries.count("}")
    cited = set()
    for name in NAMES:
        sheet = Sheet("t", ["method", "A_T (%)"], [[Cell(name), Cell("1.00")]], 1)
        source = latex_table(sheet)
        assert f"\n{latex_text(name)} & 1.00" not in source, f"conf/method/{name}.yaml needs a line # LaTeX: NAME"
        cited |= set(re.findall(r"\\cite\{(\w+)\}", source))
    assert cited == set(keys)


def test_the_files_of_a_table_have_what_it_cites_beside_it():
    nothing = pd.DataFrame({"a": [1]})
    files = table_files(Table("summary", paper_sheet(), nothing, nothing), ["tex"])
    assert files.keys() == {"tex", "bib", "runs.csv"}
    assert table_files(Table("summary", paper_sheet(), nothing, nothing), ["md"]).keys() == {"md", "runs.csv"}


def test_a_long_table_breaks_over_pages():
    sheet = Sheet("t", ["a", "b"], [[Cell(str(i)), Cell("1.0")] for i in range(60)], 1)
    source = latex_table(sheet)
    environment, rows = latex_cells(source)
    assert environment == "longtable"
    # The headers, which stand on every page, follow the caption.
    assert rows[1] == ["a", "b"]
    assert source.index(r"\endhead") < source.index("0 & 1.0")
    assert rows[2:] == [[str(i), "1.0"] for i in range(60)]


@pytest.mark.parametrize("rows", [len(NASTY), 60])
def test_latex_compiles_where_there_is_a_tex(rows, tmp_path):
    programs = [name for name in ("pdflatex", "tectonic", "lualatex", "xelatex") if shutil.which(name)]
    if not programs:
        pytest.skip("no TeX on this machine; the tables are parsed instead")
    cells = [[Cell(NASTY[i % len(NASTY)]), Cell("1.00 ± 0.20 (3)", "bold")] for i in range(rows)]
    (tmp_path / "table.tex").write_text(latex_table(Sheet("t", ["50 %", "A_avg"], cells, 1)))
    (tmp_path / "other.tex").write_text(latex_table(paper_sheet()))
    head = r"\documentclass{article}\usepackage{booktabs,longtable,siunitx}"
    setup = r"\sisetup{separate-uncertainty, detect-weight, mode=text}"
    page = head + setup + r"\begin{document}\input{table}\input{other}\end{document}"
    (tmp_path / "page.tex").write_text(page)
    line = [programs[0], "page.tex"] if programs[0] == "tectonic" else [programs[0], "-halt-on-error", "page.tex"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "page.pdf").stat().st_size > 1000
