"""How every figure looks: one colour and marker per method in all figures, and legible sizes."""

from __future__ import annotations

import csv
import io
import itertools
import zlib
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

import matplotlib
from matplotlib.figure import Figure

#: Keywords for `plot` and `errorbar`.
Look = dict[str, Any]
Marker = str | tuple[int, int, int]

#: Okabe and Ito's colours, which colour-blind readers can tell apart, without the yellow that is faint on white, and
#: three dark ones.
_COLOURS = {
    **{"blue": "#0072B2", "vermillion": "#D55E00", "green": "#009E73", "purple": "#CC79A7", "sky": "#56B4E9"},
    **{"orange": "#E69F00", "black": "#000000", "indigo": "#332288", "wine": "#882255", "brown": "#7F4F24"},
}


def _marker(written: str) -> Marker:
    """Return a marker of Matplotlib's; three numbers are a polygon, a star or an asterisk (points, 0 to 2, angle)."""
    points, *others = written.split()
    return (int(points), int(others[0]), int(others[1])) if others else written


_ROWS = list(csv.DictReader(files(__package__).joinpath("methods.csv").read_text(encoding="utf-8").splitlines()))
#: Methods that are usually compared have different colours: the well-known closed forms, the methods that train a
#: network, those inside a transformer, and what a page of docs/ compares. No two methods share a marker, so all differ
#: in a grey copy, too.
METHODS: dict[str, tuple[str, Marker]] = {
    row["method"]: (_COLOURS[row["colour"]], _marker(row["marker"])) for row in _ROWS
}
_MORE_MARKERS: tuple[Marker, ...] = ("o", "s", "^", "v", "D", "P", "X", "p", "h", "8", "H")
#: Dashes of methods; the dotted line is reserved for ceilings.
DASHES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))
_FILLS = ("none", "full", "left", "bottom")
#: Looks of methods with all data in one place: they are ceilings, not competitors.
CEILING_LOOKS: dict[str, Look] = {
    "centralised_ridge": {"color": "0.35", "linestyle": ":", "linewidth": 1.6},
    "centralised_softmax": {"color": "0.35", "linestyle": (0, (4, 2, 1, 2)), "linewidth": 1.6},
    "centralised": {"color": "0.35", "linestyle": (0, (1, 3)), "linewidth": 1.6},
}
FRONT: Look = {"color": "0.8", "linewidth": 5, "solid_joinstyle": "round", "zorder": 1}
#: The cross on points that meet a gate.
GATED: Look = {"color": "black", "marker": "x", "markersize": 13, "linestyle": "none", "zorder": 4}
#: Points that have no entry of their own in the legend.
OTHERS: Look = {"color": "0.65", "marker": ".", "markersize": 6, "linestyle": "none", "zorder": 1.5}
TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 10.5, 10, 8.5
WIDTH_INCHES = 10.0
#: The number of characters that fit into a line of `TEXT_SIZE` over the whole width.
CHARACTERS = 124
#: Options for saving each kind of file: its resolution, and its metadata (without the date).
_SAVING: dict[str, dict[str, Any]] = {
    "pdf": {"metadata": {"CreationDate": None}},
    "png": {"dpi": 150},
    "svg": {"metadata": {"Date": None}},
}
#: The file formats of a figure: for LaTeX, for a README, for a web page.
KINDS = tuple(_SAVING)


def looks(methods: Iterable[str]) -> dict[str, tuple[str, Marker]]:
    """Return colour and marker of each method: from `METHODS`, or a free pair that is chosen by the method's name."""
    taken = {*METHODS.values()}
    free = [pair for pair in itertools.product(_COLOURS.values(), _MORE_MARKERS) if pair not in taken]
    # The choice depends on the name only, not on the other methods, unless two of them pick the same pair.
    return {
        method: METHODS.get(method) or free.pop(zlib.crc32(method.encode()) % len(free))
        for method in sorted(set(methods))
    }


def line_look(pair: tuple[str, Marker], variant: int = 0) -> Look:
    """Return a method's colour and marker with the dashes and filling of its n-th variant.

    The first 16 variants of a method differ from each other.
    """
    colour, marker = pair
    fill = _FILLS[(variant + variant // len(DASHES)) % len(_FILLS)]
    around = {"markerfacecoloralt": "white", "markeredgewidth": 1.4, "markersize": 6.5}
    return {"color": colour, "marker": marker, "linestyle": DASHES[variant % len(DASHES)], "fillstyle": fill, **around}


def drawn(figure: Figure, kind: str) -> bytes:
    """Return the figure as a file's content in one of `KINDS`, with the same bytes each time.

    Letters in svg are paths and need no font; in pdf they are text in TrueType fonts, which publishers accept.
    """
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "fcl-bench", "svg.fonttype": "path", "pdf.fonttype": 42}):
        figure.savefig(buffer, format=kind, **_SAVING[kind])
    return buffer.getvalue()
