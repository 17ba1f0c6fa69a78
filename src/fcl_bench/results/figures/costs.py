"""What accuracy costs: A_avg and A_T against bytes or seconds, with the Pareto front."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fcl_bench.config import is_number, text
from fcl_bench.results.figures.canvas import ACCURACIES, Drawing, drawing
from fcl_bench.results.figures.selection import Panel, select, settings_text, styles
from fcl_bench.results.figures.style import ANNOTATION, CEILING_LOOKS, FRONT, GATED, Look
from fcl_bench.results.summarise import CEILINGS, knobs, setting, signature

_MOST_PANELS = 4
_MOST_ANNOTATED = 10
#: Most lines of one family whose starts are named; the names of more would overlap.
_MOST_NAMED = 2


#: Name in the figure's name -> the measure, its axis label with the unit, the caption, and whether points show the
#: knob's values.
COSTS = {
    "bytes": (
        *("up_max_mib", "upload of the busiest client and task (MiB)"),
        "Accuracy against what is sent, measured. Pareto front: nothing else sends as little and is more accurate.",
        True,
    ),
    "seconds": (
        *("seconds_per_task", "seconds per task: clients' mean and server (FedRAN Eq. 1)"),
        "Accuracy against time, as measured: it compares only runs of one machine under one load. "
        "Pareto front: nothing else is as fast and more accurate.",
        False,
    ),
}


def compared(summary: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of settings with two or more rivals, since a single point has nothing to be compared with."""
    rivals = ~summary["method"].isin(CEILINGS)
    return summary[rivals.groupby(signature(summary, setting(summary))).transform("sum") > 1]


def accuracy_against_cost(summary: pd.DataFrame, name: str) -> Drawing:
    """Draw one row of panels per setting: A_avg and A_T against a cost (log), with the Pareto front.

    Rows of one family differ in numeric knobs only. A line joins the points that differ only in the knob with the most
    values, in the order of that knob, whose value is written at each point; the other knobs are written at the line's
    start. Error bars are one standard deviation over seeds. Ceilings are dotted lines: they have all data in one place,
    so their cost is not comparable.

    Args:
        summary: the result of `compared`, not empty; each kind of device is a setting of its own.
        name: one of `COSTS`.
    """
    cost, label, about, annotate = COSTS[name]
    shown = select(summary, most_panels=_MOST_PANELS, most_lines=math.inf)
    ceilings = shown.rows["method"].isin(CEILINGS)
    rivals = shown.rows[~ceilings]
    numeric = {family: _numeric_knobs(group) for family, group in rivals.groupby("family", sort=False)}
    # Markers get smaller from family to family, since the exact methods reach the same point.
    own_looks = enumerate(styles(rivals, "family").items())
    looks = {family: {**look, "markersize": 10 - 0.8 * (i % 7)} for i, (family, look) in own_looks}

    def draw(measure: str, axes: Axes, panel: Panel) -> None:
        at, height = f"{cost}_mean", f"{measure}_mean"
        # A line without points leaves the layout no place.
        if len(front := pareto_front(panel.rows, at, height)):
            axes.plot(front[at], front[height], drawstyle="steps-post", **FRONT)
        for family, rows in panel.rows.groupby("family", sort=False):
            if family in looks:
                notes = annotate and len(rows) <= _MOST_ANNOTATED
                _draw_family(axes, rows, (cost, measure), numeric[family], looks[family], notes)
        gated = panel.rows[(panel.rows["gates"] != "") & ~panel.rows["method"].isin(CEILINGS) & (panel.rows[at] > 0)]
        if len(gated):
            axes.plot(gated[at], gated[height], **GATED)
        draw_ceilings(axes, panel, measure)
        axes.set_ylabel(ACCURACIES[measure])
        axes.grid(alpha=0.3, which="both")
        axes.set_xlabel(label)
        log_costs(axes, rivals[at])

    about += " Mean over seeds; bars: one standard deviation either way."
    named = {_legend(family, numeric[family]): look for family, look in looks.items()}
    named |= {f"{method} (ceiling)": CEILING_LOOKS[method] for method in shown.rows.loc[ceilings, "method"]}
    others = [Line2D([], [], label="Pareto front", **FRONT)] if len(rivals) else []
    others += [Line2D([], [], label="meets a gate: not on the front", **GATED)] if rivals["gates"].any() else []
    draws = [partial(draw, measure) for measure in ACCURACIES]
    return drawing(shown, [about], draws, height=3.6, sharex=True, names=named, more=others)


def draw_ceilings(axes: Axes, panel: Panel, measure: str) -> None:
    """Draw a line at the accuracy of each method with all data in one place, whose cost does not compare."""
    for method, height in zip(panel.rows["method"], panel.rows[f"{measure}_mean"], strict=True):
        if method in CEILINGS:
            axes.axhline(height, **CEILING_LOOKS[method])


def pareto_front(rows: pd.DataFrame, cost: str, gain: str) -> pd.DataFrame:
    """Return the rows on the Pareto front, by rising cost: no other row costs at most as much and gains more.

    Ceilings are not rivals, nor are rows that meet a gate. Rows without a cost or a gain are left out, since they have
    no position on a log axis.
    """
    competes = ~rows["method"].isin(CEILINGS) & (rows["gates"] == "")
    rivals = rows[competes & (rows[cost] > 0) & rows[gain].notna()]
    ordered = rivals.sort_values([cost, gain], ascending=[True, False], kind="stable")
    before = ordered[gain].cummax().shift(fill_value=-np.inf)
    return ordered[ordered[gain] > before]


def _numeric_knobs(rows: pd.DataFrame) -> list[str]:
    """Return the numeric knobs that vary within a family, the one with the most values last."""
    counts = {knob: rows.loc[rows[knob].map(is_number), knob].nunique() for knob in knobs(rows)}
    return sorted((knob for knob, count in counts.items() if count > 1), key=counts.__getitem__)


def _legend(family: str, numeric: list[str]) -> str:
    short = [knob.removeprefix("method.") for knob in numeric]
    if not short:
        return family
    lines = f"; lines: {', '.join(short[:-1])}" if short[:-1] else ""
    return f"{family} [points: {short[-1]}{lines}]"


def _draw_family(
    axes: Axes, rows: pd.DataFrame, over: tuple[str, str], numeric: list[str], look: Look, annotate: bool
) -> None:
    """Draw a line for each choice of the numeric knobs but the last one, which varies along it."""
    if numeric:
        rows = rows.sort_values(numeric[-1], key=pd.to_numeric)
    others = signature(rows, numeric[:-1])
    for _, line in rows.groupby(others, sort=False):
        line = draw_line(axes, line, over, look)
        if not numeric or not annotate or line.empty:
            continue
        # A curve that rises with cost leaves room below its points, and for the other knobs left of the first one.
        note = {"textcoords": "offset points", "color": look["color"], **ANNOTATION}
        points = list(zip(*(line[f"{key}_mean"] for key in over), strict=True))
        for value, point in zip(line[numeric[-1]], points, strict=True):
            axes.annotate(text(value), point, (6, -12), **note)
        if others.nunique() <= _MOST_NAMED:
            axes.annotate(", ".join(settings_text(line, numeric[:-1])), points[0], (-7, -3), ha="right", **note)


def draw_line(axes: Axes, rows: pd.DataFrame, over: tuple[str, str], look: Look) -> pd.DataFrame:
    """Draw rows with bars of one standard deviation; return those that have an accuracy and a cost above zero.

    Args:
        over: the measures of cost and accuracy.
    """
    cost, measure = over
    rows = rows[(rows[f"{cost}_mean"] > 0) & rows[f"{measure}_mean"].notna()]
    x, y = rows[f"{cost}_mean"], rows[f"{measure}_mean"]
    across, up = (rows[f"{key}_std"].fillna(0) for key in over)
    if len(rows):
        # Bytes are often the same for every seed; then there is no bar, since its ends would lie on the point.
        axes.errorbar(x, y, up if up.any() else None, log_bars(x, across) if across.any() else None, capsize=2, **look)
    return rows


def log_bars(middle: pd.Series, spread: pd.Series) -> np.ndarray:
    """Return how far bars reach to the left and to the right on a log axis, (2, n).

    A bar of one standard deviation may reach below zero, which a log axis does not have: Matplotlib then draws the
    figure without a layout. Such a bar ends at a thousandth of its middle, left of the axis.
    """
    return np.stack([np.minimum(spread, 0.999 * middle), spread])


def log_costs(axes: Axes, sizes: pd.Series, named: bool = True) -> None:
    """Set a log axis with plain numbers, for all panels that share it.

    Args:
        sizes: the values on it.
        named: whether names stand beside the points, for which the limits leave room; else panels may be narrow.
    """
    axes.set_xscale("log")
    sizes = sizes[sizes > 0]
    if len(sizes):
        span = (sizes.max() / sizes.min()) ** 0.12 if named else 1
        axes.set_xlim(sizes.min() / span / 1.4, sizes.max() * span * 1.4)
    decades = np.log10(sizes.max() / sizes.min()) if len(sizes) else 1
    is_wide = decades > (2 if named else 1.2)
    # Within a few tens of percent LogLocator would mark as many values as a linear axis has, whose texts overlap.
    locator = MaxNLocator(3) if decades < 0.3 else LogLocator(subs=(1,) if is_wide else (1, 2, 5))
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
