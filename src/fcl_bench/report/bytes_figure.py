"""The picture of a summary: what accuracy costs in uploaded bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fcl_bench.report.collect import is_number, text
from fcl_bench.report.summary import CEILING, knobs, setting, signature, varying_setting

#: Okabe and Ito's colours, which colour-blind readers tell apart, without the yellow that is faint on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
#: As many as have no common divisor with the number of colours, so that 77 families differ in one or the other.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
_LINES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))
_CEILING_STYLE: dict[str, Any] = {"color": "0.35", "linestyle": ":", "linewidth": 1.5}
#: Under the points themselves.
_NAME_STYLE: dict[str, Any] = {
    "fontsize": 9,
    "zorder": 1.9,
    "path_effects": [withStroke(linewidth=2, foreground="white")],
}
_MEASURES = {"A_avg": "$A_{avg}$, mean over tasks (%)", "A_T": "$A_T$, after the last task (%)"}
_MOST_ANNOTATED = 10


def accuracy_against_bytes(summary: pd.DataFrame) -> Figure:
    """A row of panels per setting: A_avg and A_T against the measured upload of the busiest client and task.

    Rows of one family differ in numeric knobs only. A line joins, in order of bytes, points that differ only in the
    knob with the most values, which stands at each; the other knobs stand at its start. Error bars are one
    standard deviation over seeds. `joint` is a dotted line: it has all data in one place, so its bytes do not compare.

    Args:
        summary: what `summarise` returned.
    """
    families = dict(list(summary[summary["method"] != CEILING].groupby("family", sort=False)))
    numeric = {family: _numeric_knobs(rows) for family, rows in families.items()}
    styles = {family: _style(position) for position, family in enumerate(families)}
    blocks = [rows for _, rows in summary.groupby(signature(summary, setting(summary)), sort=False)]
    figure = Figure(figsize=(10, 3.6 * len(blocks) + 0.7), layout="constrained")
    grid = figure.subplots(len(blocks), len(_MEASURES), squeeze=False, sharex=True)
    for axes_row, block in zip(grid, blocks, strict=True):
        title = ", ".join(f"{column} {text(block[column].iloc[0])}" for column in varying_setting(summary))
        for axes, (measure, ylabel) in zip(axes_row, _MEASURES.items(), strict=True):
            for family in families:
                _draw(axes, block[block["family"] == family], measure, numeric[family], styles[family])
            for height in block.loc[block["method"] == CEILING, f"{measure}_mean"].dropna():
                axes.axhline(height, **_CEILING_STYLE)
            axes.set_title(title, fontsize=11, loc="left", parse_math=False)
            axes.set_ylabel(ylabel)
            axes.margins(y=0.1)
            axes.grid(alpha=0.3, which="both")
    for axes in grid[-1]:
        axes.set_xlabel("upload of the busiest client and task (MiB)")
    _scale(grid[0, 0], summary.loc[summary["method"] != CEILING, "up_max_mib_mean"])
    handles = [Line2D([], [], label=_legend(family, numeric[family]), **style) for family, style in styles.items()]
    if (summary["method"] == CEILING).any():
        handles.append(Line2D([], [], label=f"{CEILING} (ceiling)", **_CEILING_STYLE))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)), fontsize=10, frameon=False)
    return figure


def _style(position: int) -> dict[str, Any]:
    cycles = {"color": _COLOURS, "marker": _MARKERS, "linestyle": _LINES}
    # Hollow and ever smaller, since the exact methods reach the same point.
    hollow = {"markerfacecolor": "none", "markeredgewidth": 1.5, "markersize": 10 - 0.8 * (position % 7)}
    return {**{key: cycle[position % len(cycle)] for key, cycle in cycles.items()}, **hollow}


def _numeric_knobs(rows: pd.DataFrame) -> list[str]:
    """The numeric knobs that vary within a family, the one with the most values last."""
    counts = {knob: rows.loc[rows[knob].map(is_number), knob].nunique() for knob in knobs(rows)}
    return sorted((knob for knob, count in counts.items() if count > 1), key=counts.__getitem__)


def _legend(family: str, numeric: list[str]) -> str:
    return f"{family} (points: {_short(numeric[-1])})" if numeric else family


def _draw(axes: Axes, rows: pd.DataFrame, measure: str, numeric: list[str], style: dict[str, Any]) -> None:
    """The points of one family in one panel; what has no accuracy or sent nothing has no place there."""
    rows = rows[(rows["up_max_mib_mean"] > 0) & rows[f"{measure}_mean"].notna()].sort_values("up_max_mib_mean")
    for _, line in rows.groupby(signature(rows, numeric[:-1]), sort=False):
        x, y = line["up_max_mib_mean"], line[f"{measure}_mean"]
        axes.errorbar(x, y, line[f"{measure}_std"].fillna(0), capsize=3, **style)
        if numeric and len(rows) <= _MOST_ANNOTATED:
            # Where a curve that rises with bytes leaves room: names below its points, the others left of the first.
            look = {"textcoords": "offset points", "color": style["color"], **_NAME_STYLE}
            for value, size, accuracy in zip(line[numeric[-1]], x, y, strict=True):
                axes.annotate(text(value), (size, accuracy), (6, -12), **look)
            others = ", ".join(f"{_short(knob)} {text(line[knob].iloc[0])}" for knob in numeric[:-1])
            axes.annotate(others, (x.iloc[0], y.iloc[0]), (-7, -3), ha="right", **look)


def _short(knob: str) -> str:
    return knob.removeprefix("method.")


def _scale(axes: Axes, sizes: pd.Series) -> None:
    """A log axis with plain numbers, for all panels (they share it)."""
    axes.set_xscale("log")
    sizes = sizes[sizes > 0]
    if len(sizes):
        # Room for the names, too.
        span = (sizes.max() / sizes.min()) ** 0.12
        axes.set_xlim(sizes.min() / span / 1.4, sizes.max() * span * 1.4)
    is_wide = len(sizes) > 0 and np.log10(sizes.max() / sizes.min()) > 2
    axes.xaxis.set_major_locator(LogLocator(subs=(1,) if is_wide else (1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
