"""The figure of the effect of the SVD rank r and the projection's width M (FedRAN Fig. 6): lines and a heat map."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fcl_bench.config import is_number, text
from fcl_bench.results.figures.canvas import ACCURACIES, Drawing, canvas, legend, percent_axes, ticks, title
from fcl_bench.results.figures.selection import Panel, seeds_text, settings_text, shared
from fcl_bench.results.figures.style import COLOUR_MAP, DASHES, SMALL_SIZE, Look
from fcl_bench.results.summarise import knobs, setting, signature, varying_setting

RANK, WIDTH = "method.rank", "method.M"
_MOST = 4
_MARKERS = ("o", "s", "^", "D", "v")


def grids(summary: pd.DataFrame) -> list[Panel]:
    """Return grids of one method in one setting that differ only in r and M, at least two of each; largest first."""
    if not {RANK, WIDTH} <= set(summary):
        return []
    rows = summary[summary[RANK].map(is_number) & summary[WIDTH].map(is_number)]
    if rows.empty:
        return []
    others = [knob for knob in knobs(rows) if knob not in (RANK, WIDTH)]
    blocks = rows.groupby(signature(rows, [*setting(rows), "method", *others]), sort=False)
    full = [block for block in (_crossed(rows) for _, rows in blocks) if len(block)]
    if not full:
        return []
    together = pd.concat(full)
    varying = [*varying_setting(together), *(knob for knob in others if together[knob].map(text).nunique() > 1)]
    found = [Panel(", ".join([str(block["method"].iloc[0]), *settings_text(block, varying)]), block) for block in full]
    return sorted(found, key=lambda grid: -len(grid.rows))


def _crossed(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows whose M was run with another r and whose r was run with another M; others show no effect."""
    while len(rows):
        ranks, widths = (rows.groupby(key)[other].transform("nunique") for key, other in ((WIDTH, RANK), (RANK, WIDTH)))
        decided = rows[(ranks > 1) & (widths > 1)]
        if len(decided) == len(rows):
            break
        rows = decided
    return rows


def rank_by_width(found: list[Panel]) -> Drawing:
    """Draw one row of two panels per grid: A_avg against r, one line per M, and a heat map of both with the upload."""
    shown, rows = found[:_MOST], pd.concat([grid.rows for grid in found[:_MOST]])
    more = len(found) - len(shown)
    notes = [
        "Effect of the SVD rank r at different widths M of the random projection (FedRAN Fig. 6).",
        f"Mean over seeds; bar: one standard deviation either way; {seeds_text(rows)}.",
        "Right: A_avg (%), below it the measured upload of the busiest client and task.",
        *(shared(rows), f"{more} more grids are not drawn here; --where picks them." if more else ""),
    ]
    figure, axes = canvas(2 * len(shown), 2, notes, height=3.6)
    widths = sorted({int(width) for width in rows[WIDTH]})
    lines = {width: _look(position, len(widths)) for position, width in enumerate(widths)}
    for index, grid in enumerate(shown):
        _lines(axes[2 * index], grid, lines)
        _heat(figure, axes[2 * index + 1], grid)
        for side in (0, 1):
            title(axes[2 * index + side], grid.title, 2)
    percent_axes(axes[: 2 * len(shown) : 2])
    legend(figure, {f"M = {width}": look for width, look in lines.items()})
    return figure


def _look(position: int, count: int) -> Look:
    """Return the look of a line for one M: M is a quantity, so colours follow the colour map, without pale yellow."""
    colour = colormaps[COLOUR_MAP](0.75 * position / max(1, count - 1))
    dashes, marker = DASHES[position % len(DASHES)], _MARKERS[position % len(_MARKERS)]
    return {"color": colour, "marker": marker, "linestyle": dashes, "markersize": 6}


def _lines(axes: Axes, grid: Panel, looks_of: dict[int, Look]) -> None:
    for width, rows in grid.rows.groupby(WIDTH):
        rows = rows.assign(**{RANK: rows[RANK].astype(float)}).sort_values(RANK)
        axes.errorbar(rows[RANK], rows["A_avg_mean"], rows["A_avg_std"].fillna(0), capsize=3, **looks_of[int(width)])
    ticks(axes, list(grid.rows[RANK].astype(float)), log_base=2)
    axes.set_xlabel("rank, r")
    axes.set_ylabel(ACCURACIES["A_avg"])


def _heat(figure: Figure, axes: Axes, grid: Panel) -> None:
    table = grid.rows.assign(**{key: grid.rows[key].astype(int) for key in (RANK, WIDTH)})
    accuracy = table.pivot(index=WIDTH, columns=RANK, values="A_avg_mean")
    sizes = table.pivot(index=WIDTH, columns=RANK, values="up_max_mib_mean").to_numpy(float)
    values = accuracy.to_numpy(float)
    image = axes.imshow(np.ma.masked_invalid(values), cmap=COLOUR_MAP, aspect="auto", origin="lower")
    axes.grid(False)
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            corner = (column - 0.5, row - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, hatch="//", edgecolor="0.6", linewidth=0))
            axes.text(column, row, "not run", ha="center", va="center", fontsize=SMALL_SIZE, backgroundcolor="white")
            continue
        size = sizes[row, column]
        sent = f"{size:.3g} MiB" if size >= 0.1 else f"{1024 * size:.3g} KiB"
        words = f"{value:.1f}" if np.isnan(size) else f"{value:.1f}\n{sent}"
        shade = "white" if value < middle else "black"
        axes.text(column, row, words, ha="center", va="center", fontsize=SMALL_SIZE, color=shade)
    axes.set_xticks(range(values.shape[1]), [str(rank) for rank in accuracy.columns])
    axes.set_yticks(range(values.shape[0]), [str(width) for width in accuracy.index])
    axes.set_xlabel("rank, r")
    axes.set_ylabel("width, M")
    figure.colorbar(image, ax=axes, label=ACCURACIES["A_avg"])
