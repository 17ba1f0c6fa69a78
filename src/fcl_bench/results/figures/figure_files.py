"""What a figure becomes in files: the picture in every format, and its caption in files of its own."""

from __future__ import annotations

from collections.abc import Iterable

from fcl_bench.results.figures.canvas import Drawing
from fcl_bench.results.figures.style import KINDS, drawn
from fcl_bench.results.tables.markup import latex_text


def pictures(figure: Drawing, kinds: Iterable[str] = KINDS) -> dict[str, bytes]:
    """Return suffix -> content: pdf, png and svg, with the same layout."""
    found = {}
    for kind in kinds:
        found[kind] = drawn(figure, kind)
        # The first drawing has found the places of panels and legend, which takes nearly as long as drawing them.
        figure.set_layout_engine("none")
    return found


def captions(figure: Drawing) -> dict[str, str]:
    r"""Return suffix -> content: the caption as text, and for LaTeX (\caption{\input{...}})."""
    return {"caption.txt": f"{figure.caption}\n", "caption.tex": f"{latex_text(figure.caption)}\n"}
