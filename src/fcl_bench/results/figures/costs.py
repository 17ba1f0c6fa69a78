"""What accuracy costs: A_avg and A_T against bytes or seconds, with the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fcl_bench.config import is_number, text
from fcl_bench.results.figures import selection
from fcl_bench.results.figures.canvas import ACCURACIES, Drawing, drawing
from fcl_bench.results.summarise import CEILINGS, knobs, setting, signature

_MOST_PANELS = 4

#: Name in the figure's name -> the measure, its axis label with the unit, and the caption.
COSTS = {
    "bytes": (
        *("up_max_mib", "upload of the busiest client and task (MiB)"),
        "Accuracy against what is sent, measured. Pareto front: nothing else sends as little and is more accurate.",
    ),
    "seconds": (
        *("seconds_per_task", "seconds per task: clients' mean and server (FedRAN Eq. 1)"),
        "Accuracy against time, as measured: it compares only runs of one machine under one load. "
        "Pareto front: nothing else is as fast and more accurate.",
    ),
}


def compared(summary: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of settings with two or more rivals, since a single point has nothing to be compared with."""
    rivals = ~summary["method"].isin(CEILINGS)
    return summary[rivals.groupby(signature(summary, setting(summary))).transform("sum") > 1]


def accuracy_against_cost(summary: pd.DataFrame, name: str) -> Drawing:
    """Draw one row of panels per setting: A_avg and A_T against a cost (log), with the Pareto front.

    Rows of one family differ in numeric knobs only. A line joins the points that differ only in the knob with the most
    values, in the order of that knob. If there are more families than a legend has room for, it names those on a front,
    then the most accurate ones, and the others are grey. Error bars are one standard deviation over seeds. Ceilings are
    dotted lines: they have all data in one place, so their cost is not comparable.

    Args:
        summary: the result of `compared`, not empty; each kind of device is a setting of its own.
        name: one of `COSTS`.
    """
    cost, label, about = COSTS[name]
    at = f"{cost}_mean"
    shown = selection.select(summary, most_panels=_MOST_PANELS, most_lines=math.inf)
    ceilings = shown.rows["method"].isin(CEILINGS)
    rivals = shown.rows[~ceilings]
    more = [Line2D([], [], label="Pareto front", **selection.FRONT)] if len(rivals) else []
    more += [Line2D([], [], label="meets a gate: not on the front", **selection.GATED)] if rivals["gates"].any() else []
    dotted = {f"{method} (ceiling)": selection.CEILING_LOOKS[method] for method in shown.rows.loc[ceilings, "method"]}
    named = _named(shown.panels, at, selection.MOST_LINES - len(more) - len(dotted))
    others = rivals["family"].nunique() - len(named)
    more += [Line2D([], [], label=f"{others} others", **selection.OTHERS)] if others else []
    numeric = {family: _numeric_knobs(group) for family, group in rivals.groupby("family") if family in named}
    # Markers get smaller from family to family, since the exact methods reach the same point.
    own_looks = enumerate(selection.styles(rivals[rivals["family"].isin(named)], "family").items())
    looks = {family: {**look, "markersize": 10 - 0.8 * (i % 7)} for i, (family, look) in own_looks}

    def draw(measure: str, axes: Axes, panel: selection.Panel) -> None:
        height = f"{measure}_mean"
        # A line without points leaves the layout no place.
        if len(front := pareto_front(panel.rows, at, height)):
            axes.plot(front[at], front[height], drawstyle="steps-post", **selection.FRONT)
        rows = panel.rows[~panel.rows["method"].isin(CEILINGS) & (panel.rows[at] > 0)]
        for chosen, look in ((~rows["family"].isin(named), selection.OTHERS), (rows["gates"] != "", selection.GATED)):
            if chosen.any():
                axes.plot(rows.loc[chosen, at], rows.loc[chosen, height], **look)
        for family, own in rows[rows["family"].isin(named)].groupby("family", sort=False):
            *along, last = numeric[family] or [at]
            own = own.sort_values(last, key=pd.to_numeric)
            for _, line in own.groupby(signature(own, along), sort=False):
                _draw_line(axes, line, cost, measure, looks[family])
        # Methods with all data in one place: a line, since their cost does not compare.
        for _, ceiling in panel.rows[panel.rows["method"].isin(CEILINGS)].iterrows():
            axes.axhline(ceiling[height], **selection.CEILING_LOOKS[ceiling["method"]])
        axes.set_ylabel(ACCURACIES[measure])
        axes.grid(alpha=0.3, which="both")
        axes.set_xlabel(label)
        log_costs(axes, rivals[at])

    about += " Mean over seeds; bars: one standard deviation either way."
    labelled = {_legend(rivals[rivals["family"] == family], numeric[family]): look for family, look in looks.items()}
    draws = [partial(draw, measure) for measure in ACCURACIES]
    return drawing(shown, [about], draws, height=3.6, sharex=True, names=labelled | dotted, more=more)


def _named(panels: Sequence[selection.Panel], cost: str, most: int) -> set[str]:
    """Return the families that a legend names: all, or at most `most` - 1, since one entry is of the others."""
    rows = pd.concat([panel.rows for panel in panels])
    fronts = [pareto_front(panel.rows, cost, f"{measure}_mean") for panel in panels for measure in ACCURACIES]
    ahead = pd.concat(fronts)["family"].value_counts()
    rivals = rows[~rows["method"].isin(CEILINGS)]
    accuracy = rivals.groupby("family")["A_avg_mean"].mean().sort_values(ascending=False, kind="stable")
    ranked = sorted(accuracy.index, key=lambda family: -ahead.get(family, 0))
    return set(ranked if len(ranked) <= most else ranked[: most - 1])


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
    counts = {
        knob: rows.loc[rows[knob].map(is_number), knob].nunique()
        for knob in knobs(rows.dropna(axis="columns", how="all"))
    }
    return sorted((knob for knob, count in counts.items() if count > 1), key=counts.__getitem__)


def _legend(rows: pd.DataFrame, numeric: list[str]) -> str:
    """Name a family, with the range of each numeric knob; the last one varies along a line."""
    family = rows["family"].iloc[0]
    ends = {knob: sorted(pd.to_numeric(rows[knob], errors="coerce").dropna()) for knob in numeric}
    ranges = [f"{knob.removeprefix('method.')} {text(of[0])} to {text(of[-1])}" for knob, of in ends.items()]
    return f"{family} [{', '.join(ranges)}]" if ranges else str(family)


def _draw_line(axes: Axes, rows: pd.DataFrame, cost: str, measure: str, look: selection.Look) -> None:
    """Draw rows that have a cost above zero, with bars of one standard deviation, if they have an accuracy."""
    rows = rows[rows[f"{measure}_mean"].notna()]
    x, y = rows[f"{cost}_mean"], rows[f"{measure}_mean"]
    across, up = (rows[f"{key}_std"].fillna(0) for key in (cost, measure))
    if len(rows):
        # Bytes are often the same for every seed; then there is no bar, since its ends would lie on the point.
        axes.errorbar(x, y, up if up.any() else None, log_bars(x, across) if across.any() else None, capsize=2, **look)


def log_bars(middle: pd.Series, spread: pd.Series) -> np.ndarray:
    """Return how far bars reach to the left and to the right on a log axis, (2, n).

    A bar of one standard deviation may reach below zero, which a log axis does not have: Matplotlib then draws the
    figure without a layout. Such a bar ends at a thousandth of its middle, left of the axis.
    """
    return np.stack([np.minimum(spread, 0.999 * middle), spread])


def log_costs(axes: Axes, sizes: pd.Series) -> None:
    """Set a log axis with plain numbers, for all panels that share it; `sizes` are the values on it."""
    axes.set_xscale("log")
    sizes = sizes[sizes > 0]
    if len(sizes):
        axes.set_xlim(sizes.min() / 1.4, sizes.max() * 1.4)
    decades = np.log10(sizes.max() / sizes.min()) if len(sizes) else 1
    # Within a few tens of percent LogLocator would mark as many values as a linear axis has, whose texts overlap.
    locator = MaxNLocator(3) if decades < 0.3 else LogLocator(subs=(1,) if decades > 1.2 else (1, 2, 5))
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
