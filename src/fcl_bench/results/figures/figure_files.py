"""Writes a figure as files: the picture in every format, and its caption in files of its own."""

from __future__ import annotations

from fcl_bench.results.figures.canvas import Drawing
from fcl_bench.results.figures.style import KINDS, drawn
from fcl_bench.results.tables.markup import latex_text


def figure_files(figure: Drawing) -> dict[str, str | bytes]:
    r"""Return suffix -> content: pdf, png, svg, and the caption as text and for LaTeX (\caption{\input{...}})."""
    captions = {"caption.txt": f"{figure.caption}\n", "caption.tex": f"{latex_text(figure.caption)}\n"}
    return {**{kind: drawn(figure, kind) for kind in KINDS}, **captions}
