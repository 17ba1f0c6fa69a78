"""What a figure shows of a summary: settings as panels, configurations as lines; the look of each method."""

from __future__ import annotations

import csv
import io
import itertools
import shlex
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from fcl_bench.config import text
from fcl_bench.results.summarise import CEILINGS, setting, signature, varying_setting

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


MOST_PANELS = 6
MOST_LINES = 10
_UNTOLD = ("features", "data_fingerprint", "dtype")
#: Defaults, which captions leave out.
_USUAL = {"adapt none", "faults none", "noise none", "secure none", "on_bad_upload fail"}
_USUAL |= {"protocol task-agnostic", "label_rate 1"}


@dataclass(frozen=True)
class Panel:
    """One setting: its title, which distinguishes it from the others, and its rows of the summary."""

    title: str
    rows: pd.DataFrame


@dataclass(frozen=True)
class Selection:
    """What a figure shows of a summary.

    Attributes:
        panels: the settings.
        rows: those of all panels.
        looks: label -> how its line looks.
        notes: what captions say of it: n, what all rows share, and what is left out.
    """

    panels: list[Panel]
    rows: pd.DataFrame
    looks: dict[str, Look]
    notes: list[str]

    def legend(self) -> dict[str, Look]:
        """Return name -> look; names say what is a ceiling, and what meets a gate in any panel."""
        found = {}
        for label, own in self.rows.groupby("label", sort=False):
            ceiling = " (ceiling)" if own["method"].iloc[0] in CEILINGS else ""
            found[f"{label}{ceiling}{' (gate)' if own['gates'].any() else ''}"] = self.looks[label]
        return found


def select(
    summary: pd.DataFrame, without: Sequence[str] = (), most_panels: int = MOST_PANELS, most_lines: float = MOST_LINES
) -> Selection:
    """Return what a figure shows of the result of `summarise`; see `panels` and `lines`."""
    shown, left_out = panels(summary, without, most_panels)
    shown, fewer = lines(shown, most_lines)
    rows = pd.concat([panel.rows for panel in shown])
    return Selection(shown, rows, styles(rows), [f"{seeds_text(rows)}.", shared(rows), fewer, left_out])


def panels(summary: pd.DataFrame, without: Sequence[str] = (), most: int = MOST_PANELS) -> tuple[list[Panel], str]:
    """Return the settings with the most configurations, in the order of the tables, and a note on those left out.

    Args:
        summary: the result of `summarise`.
        without: columns of the setting that may differ within a panel, since they are its horizontal axis.
        most: the largest number of panels.
    """
    frame = summary.drop(columns=list(without))
    blocks = [rows for _, rows in summary.groupby(signature(frame, setting(frame)), sort=False)]
    ranked = sorted(range(len(blocks)), key=lambda position: -blocks[position]["label"].nunique())
    shown = [blocks[position] for position in sorted(ranked[:most])]
    varying = varying_setting(pd.concat(shown).drop(columns=list(without)))
    found = [Panel(", ".join(settings_text(rows, varying)), rows) for rows in shown]
    if len(ranked) <= most:
        return found, ""
    example = settings_text(blocks[ranked[most]], varying_setting(frame)[:3])
    keys = " ".join(f"--where {shlex.quote(words.replace(' ', '=', 1))}" for words in example)
    settings = "1 more setting has" if len(ranked) == most + 1 else f"{len(ranked) - most} more settings have"
    return found, f"{settings} no panel here; to draw others: fcl-tables --figures {keys}."


def lines(shown: list[Panel], most: float = MOST_LINES) -> tuple[list[Panel], str]:
    """Return the panels with at most `most` configurations in all, ceilings among them, and a note on the others.

    If there are more, each family keeps the configuration that was run in most panels, and among those the most
    accurate one (A_avg), after which come those that meet a gate; the best family of each method comes first, then
    each method's second best, and so on.
    """
    rows = pd.concat([panel.rows for panel in shown])
    is_ceiling = rows["method"].isin(CEILINGS)
    most -= rows.loc[is_ceiling, "label"].nunique()
    rows = rows[~is_ceiling]
    labels = (
        rows.assign(sound=rows["gates"] == "")
        .groupby("label", sort=False)
        .agg(
            **{name: (name, "first") for name in ("method", "family")},
            **{"runs": ("label", "size"), "sound": ("sound", "mean"), "accuracy": ("A_avg_mean", "mean")},
        )
    )
    if len(labels) <= most:
        return shown, ""
    ranked = labels.sort_values(["runs", "sound", "accuracy"], ascending=False, kind="stable").drop_duplicates("family")
    place = ranked.groupby("method").cumcount()
    chosen = set(ranked.assign(place=place).sort_values("place", kind="stable").index[: int(most)])
    fewer = [
        Panel(panel.title, panel.rows[panel.rows["label"].isin(chosen) | panel.rows["method"].isin(CEILINGS)])
        for panel in shown
    ]
    notes = (
        f"Of {len(labels)} configurations {len(chosen)} are drawn: of each kind the one with most panels, then the "
        "most accurate here; --where picks others."
    )
    return [panel for panel in fewer if len(panel.rows)], notes


def styles(rows: pd.DataFrame, column: str = "label") -> dict[str, Look]:
    """Return label (or family) -> look; lines of one method share colour and marker, ceilings have no marker.

    Dashes and filling go by family, so that figures with the same families draw them alike.
    """
    kinds = rows.drop_duplicates(column)
    pairs = looks(kinds["method"])
    variants = kinds.sort_values("family", kind="stable").groupby("method").cumcount().reindex(kinds.index)
    return {
        kind: CEILING_LOOKS[method] if method in CEILING_LOOKS else line_look(pairs[method], variant)
        for kind, method, variant in zip(kinds[column], kinds["method"], variants, strict=True)
    }


def seeds_text(rows: pd.DataFrame) -> str:
    """Return n in words: one number if all rows have the same, else its range."""
    least, most = int(rows["n"].min()), int(rows["n"].max())
    if least == most:
        return f"n = {least} seeds" if least > 1 else "n = 1 seed, so without a deviation"
    return f"n = {least} to {most} seeds{', without a deviation where it is 1' if least == 1 else ''}"


def shared(rows: pd.DataFrame) -> str:
    """Return a caption's last sentence: the setting that all rows share, without fingerprints and minor keys."""
    major = [column for column in setting(rows) if column == "wire.dtype" or "." not in column]
    values = {column: set(rows[column].map(text)) for column in major if column not in _UNTOLD}
    common = [f"{column} {min(value)}" for column, value in values.items() if len(value) == 1]
    common = [words for words in common if words not in _USUAL and not words.endswith((" ", " null"))]
    return f"All: {', '.join(common)}." if common else ""


def settings_text(rows: pd.DataFrame, columns: list[str]) -> list[str]:
    """Return each column with its value, which is the same in all `rows`; columns without a value are left out."""
    values = {column.removeprefix("method."): text(rows[column].iloc[0]) for column in columns}
    return [f"{column} {value}" for column, value in values.items() if value]
