"""Writes a table's files: CSV, Markdown for a repository's viewer, LaTeX for a paper (siunitx, booktabs)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcl_bench.composition import choices_of, file_of
from fcl_bench.files import csv_cell
from fcl_bench.results.tables.cells import ABSENT, Cell, Sheet, Table

if TYPE_CHECKING:
    import pandas as pd

#: Tables with more rows break over pages.
_PAGE = 45
#: Value, deviation, number of seeds, gates: a cell with a number.
_NUMBER = re.compile(r"(-?[\d.]+)(?: ± ([\d.]+))?(?: \((\d+)\))?( \[gate: .*\])?")
_PREAMBLE = r"\usepackage{booktabs,longtable,siunitx} \sisetup{separate-uncertainty, detect-weight, mode=text}"
_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "`": r"\textasciigrave{}",
    # After a row's end, TeX would read these as a star or an optional argument.
    "*": "{*}",
    "[": "{[}",
    "]": "{]}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": "$-$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
}


def latex_table(sheet: Sheet) -> str:
    """Return a table (over pages a longtable), n in its caption, settings as lines above rows, notes as comments."""
    shown = [at for at, header in enumerate(sheet.headers) if at not in sheet.facets and header != "n"]
    width, texts = len(shown), sum(at < sheet.texts for at in shown)
    headers = [_symbols(sheet.headers[at]) for at in shown]
    head = " & ".join([*headers[:texts], *(f"{{{header}}}" for header in headers[texts:])]) + r" \\"
    body: list[str] = []
    for setting, rows in groupby(sheet.rows, lambda row: [row[at].text for at in sheet.facets]):
        heading = ", ".join(f"{sheet.headers[at]} {value}" for at, value in zip(sheet.facets, setting, strict=True))
        above = [rf"\multicolumn{{{width}}}{{l}}{{\emph{{{latex_text(heading)}}}}} \\"] if heading else []
        body += [r"\midrule", *above, *(" & ".join(_cell(sheet, row[at], at) for at in shown) + r" \\" for row in rows)]
    columns = f"{{{'l' * texts}{'S' * (width - texts)}}}"
    caption = [rf"\caption{{{_caption(sheet)}}}", rf"\label{{tab:{re.sub('[^a-z0-9]+', '-', sheet.title.lower())}}}"]
    if len(sheet.rows) > _PAGE:
        first = [rf"\begin{{longtable}}{columns}", *caption[:1], caption[1] + r" \\"]
        lines = [*first, r"\toprule", head, r"\endhead", *body, r"\bottomrule", r"\end{longtable}"]
    else:
        first = [r"\begin{table}", r"\centering", *caption, rf"\begin{{tabular}}{columns}"]
        lines = [*first, r"\toprule", head, *body, r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    lines += [f"% {one_line(note)}" for note in sheet.notes]
    return "\n".join([f"% Needs, in the preamble: {_PREAMBLE}", *lines]) + "\n"


def bibliography(latex: str) -> str:
    r"""Return the BibTeX entries of what is cited; a method of one's own with another key brings its own."""
    entries = Path(__file__).with_name("methods.bib").read_text()
    cited = set(re.findall(r"\\cite\{(\w+)\}", latex))
    found = re.findall(r"(@\w+\{(\w+),\n.*?^\}\n)", entries, re.M | re.S)
    return "\n".join(entry for entry, key in found if key in cited)


def _cell(sheet: Sheet, cell: Cell, at: int) -> str:
    found = _NUMBER.fullmatch(cell.text) if at >= sheet.texts else None
    if found is None:
        text, _, gate = cell.text.partition(" [gate: ")
        text = _method(text) if sheet.headers[at] == "method" else latex_text(text)
        text = (rf"\textbf{{{text}}}" if cell.mark else text) + (r"$^\dagger$" if gate else "")
        return text if at < sheet.texts else f"{{{text}}}"
    value, deviation, _, gate = found.groups()
    exact = f"{0:.{len(value.partition('.')[2])}f}"  # a zero, as exact as the value
    spread = f" +- {exact if deviation == '0' else deviation}" if deviation else ""
    return (r"\bfseries " if cell.mark else "") + value + spread + (r" {$^\dagger$}" if gate else "")


@functools.cache
def _method(label: str) -> str:
    """A method as its YAML writes it (`# LaTeX: AFL~\\cite{...}`), and the knobs that tell it from others."""
    name, *knobs = label.split(" ")
    text = file_of("method", name).read_text() if name in choices_of("method") else ""
    written = re.search(r"^# LaTeX: (.+)$", text, re.M)
    return ", ".join([written[1] if written else latex_text(name), *map(latex_text, knobs)])


def _symbols(header: str) -> str:
    r"""`A_avg` as $\bar A$, `A_T` as $A_T$."""
    text = re.sub(r"\bA\\_avg(?![\w\\])", r"$\\bar A$", latex_text(header))
    return re.sub(r"\b([A-Z])\\_(\w)(?![\w\\])", r"$\1_\2$", text)


def _caption(sheet: Sheet) -> str:
    """What the numbers are, and what the marks mean."""
    cells = [(header, cell) for row in sheet.rows for header, cell in zip(sheet.headers, row, strict=True)]
    matches = [_NUMBER.fullmatch(cell.text) for _, cell in cells]
    counts = sorted(
        {int(cell.text) for header, cell in cells if header == "n"} | {int(m[3]) for m in matches if m and m[3]}
    )
    over = f"{counts[0]} to {counts[-1]}" if counts[1:] else "".join(map(str, counts))
    seeds = rf": mean $\pm$ standard deviation over {over} seed{'' if over == '1' else 's'}"
    sentences = [f"{latex_text(sheet.title)}{seeds if over else ''}."]
    if any(cell.mark for _, cell in cells):
        sentences.append(r"Bold: the best, and what is not distinguishable from it (paired 95\,\% interval).")
    if gates := sorted({found[1] for _, cell in cells if (found := re.search(r"\[gate: (.*)\]$", cell.text))}):
        sentences.append(rf"$\dagger$: not a fair sample of the method ({latex_text(', '.join(gates))}).")
    return " ".join(sentences)


def latex_text(text: str) -> str:
    """Escape `text` for LaTeX."""
    plain = re.sub("|".join(map(re.escape, _LATEX_ESCAPES)), lambda found: _LATEX_ESCAPES[found[0]], one_line(text))
    # TeX would turn two hyphens into a dash.
    return re.sub("-(?=-)", "-{}", plain)


def one_line(text: str) -> str:
    """Return `text` without line breaks."""
    return " ".join(text.split())


_MARKDOWN = {"": "{}", "bold": "**{}**"}


def markdown_page(sheet: Sheet) -> str:
    """Return title, table with right-aligned numbers, and notes as Markdown."""
    lines = [[_markdown(header) for header in sheet.headers]]
    lines.append(["---"] * sheet.texts + ["---:"] * (len(sheet.headers) - sheet.texts))
    lines += [[_MARKDOWN[cell.mark].format(_markdown(cell.text)) for cell in row] for row in sheet.rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([f"# {_markdown(sheet.title)}", table, *map(_markdown, sheet.notes)]) + "\n"


def table_files(table: Table, formats: Iterable[str]) -> dict[str, str]:
    """Return suffix -> text of the `formats` (csv, md, tex with a bib beside it) and of the runs behind the cells."""
    forms = {"csv": _csv(table.values), "md": markdown_page(table.sheet), "tex": latex_table(table.sheet)}
    chosen = {suffix: forms[suffix] for suffix in forms if suffix in formats}
    cited = bibliography(chosen.get("tex", ""))
    return {**chosen, **({"bib": cited} if cited else {}), "runs.csv": _csv(table.runs)}


def _csv(frame: pd.DataFrame) -> str:
    texts = frame.select_dtypes(exclude="number").columns
    safe = frame.assign(**{str(name): frame[name].map(_csv_cell) for name in texts})
    return safe.rename(columns=csv_cell).to_csv(index=False)


def _csv_cell(value: Any) -> Any:
    """Like `csv_cell`, but words in place of a value stay as they are, so that `read_csv` finds those of `ABSENT`."""
    return value if isinstance(value, str) and value in ABSENT else csv_cell(value)


def _markdown(text: str) -> str:
    """Escape `text` for a Markdown cell or paragraph; underscores within words need no escape."""
    plain = one_line(re.sub(r"([\\`*|\[\]])", r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;"))
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", plain)
