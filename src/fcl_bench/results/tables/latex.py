r"""Tables as LaTeX, to be taken in with \input."""

from __future__ import annotations

import re

from fcl_bench.results.tables.cells import Sheet

_ESCAPES = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "`": r"\textasciigrave{}",
    # After a row's end, TeX would read a star or an optional argument.
    "*": "{*}",
    "[": "{[}",
    "]": "{]}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": "$-$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
}
_AROUND = {"": "{}", "bold": r"\textbf{{{}}}", "underline": r"\underline{{{}}}"}
_NEEDS = "% Needs, in the preamble: \\usepackage{booktabs}"
#: Longer tables break over pages.
_PAGE = 45


def latex_table(sheet: Sheet) -> str:
    """A tabular with booktabs' rules, or a longtable where it is longer than a page; notes stand as comments."""
    is_long = len(sheet.rows) > _PAGE
    environment = "longtable" if is_long else "tabular"
    columns = "l" * sheet.texts + "r" * (len(sheet.headers) - sheet.texts)
    lines = [
        f"% {_one_line(sheet.title)}",
        _NEEDS + (r" \usepackage{longtable}" if is_long else ""),
        f"\\begin{{{environment}}}{{{columns}}}",
        r"\toprule",
        _row([escaped(header) for header in sheet.headers]),
        r"\midrule",
        *([r"\endhead", r"\bottomrule", r"\endfoot"] if is_long else []),
        *(_row([_AROUND[mark].format(escaped(content)) for content, mark in row]) for row in sheet.rows),
        *([] if is_long else [r"\bottomrule"]),
        f"\\end{{{environment}}}",
        *(f"% {_one_line(note)}" for note in sheet.notes),
    ]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """`text` so that TeX sets it as it is."""
    plain = re.sub("|".join(map(re.escape, _ESCAPES)), lambda found: _ESCAPES[found[0]], _one_line(text))
    # Two hyphens would become a dash.
    return re.sub("-(?=-)", "-{}", plain) if "--" in text else plain


def _row(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _one_line(text: str) -> str:
    return " ".join(text.split())
