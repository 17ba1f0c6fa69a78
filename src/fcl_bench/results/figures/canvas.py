"""The layout of figures: a grid of panels, one legend below, a caption apart from the picture; and their files."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fcl_bench.config import text
from fcl_bench.results.figures import selection
from fcl_bench.results.tables.markup import latex_text

#: The measures that figures of accuracy show side by side, and the labels of their axes.
ACCURACIES = {"A_avg": "$A_{avg}$, mean over tasks (%)", "A_T": "$A_T$, after the last task (%)"}


class Drawing(Figure):
    """A figure whose caption is not part of the picture, since a paper typesets it in its own font.

    Attributes:
        caption: what the figure shows, in sentences.
    """

    caption: str = ""


def pictures(figure: Drawing, kinds: Iterable[str] = selection.KINDS) -> dict[str, bytes]:
    """Return suffix -> content: pdf, png and svg, with the same layout."""
    found = {}
    for kind in kinds:
        found[kind] = selection.drawn(figure, kind)
        # The first drawing has found the places of panels and legend, which takes nearly as long as drawing them.
        figure.set_layout_engine("none")
    return found


def captions(figure: Drawing) -> dict[str, str]:
    r"""Return suffix -> content: the caption as text, and for LaTeX (\caption{\input{...}})."""
    return {"caption.txt": f"{figure.caption}\n", "caption.tex": f"{latex_text(figure.caption)}\n"}


def caption(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def canvas(count: int, columns: int, height: float = 3.3, sharex: bool = False) -> tuple[Drawing, list[Axes]]:
    """Return a figure with `count` panels in rows of `columns`.

    Args:
        count, columns: numbers of panels, in all and per row; the last row may be short.
        height: the height of a row in inches.
        sharex: whether all panels have one horizontal axis.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Drawing(figsize=(selection.WIDTH_INCHES, height * rows + 0.7), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=sharex).ravel()
    for axes in grid[count:]:
        axes.remove()
    for axes in grid[:count]:
        axes.tick_params(labelsize=selection.SMALL_SIZE + 0.5, labelbottom=True, labelleft=True)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    return figure, list(grid[:count])


def drawing(
    shown: selection.Selection,
    about: Sequence[str],
    draws: Sequence[Callable[[Axes, selection.Panel], None]],
    columns: int | None = None,
    height: float = 3.3,
    sharex: bool = False,
    names: Mapping[str, selection.Look] | None = None,
    more: Sequence[Artist] = (),
) -> Drawing:
    """Return a figure with one panel for each setting and each of `draws`.

    Args:
        shown: the settings, of which the caption says what it does not show.
        about: the caption's first sentences.
        draws: draw accuracies in percent; the panels of each have one vertical axis.
        columns: panels in a row, if not those of one setting.
        height, sharex: see `canvas`.
        names, more: see `legend`; None: the names of lines.
    """
    pairs = list(product(shown.panels, draws))
    columns = min(len(pairs), columns or len(draws))
    figure, grid = canvas(len(pairs), columns, height, sharex)
    figure.caption = caption(*about, *shown.notes)
    for axes, (panel, draw) in zip(grid, pairs, strict=True):
        draw(axes, panel)
        title(axes, panel.title, columns)
    for wanted in draws:
        # Within 0 to 100, so that heights compare.
        share([axes for axes, (_, draw) in zip(grid, pairs, strict=True) if draw is wanted], 0.0, 100.0)
    legend(figure, shown.legend() if names is None else names, more)
    return figure


def title(axes: Axes, words: str, columns: int) -> None:
    """Set a panel's title, wrapped to its width; names that users chose are not parsed as formulas."""
    width = int(0.9 * selection.CHARACTERS / columns)
    wrapped = textwrap.fill(words, width, break_on_hyphens=False)
    axes.set_title(wrapped, fontsize=selection.TITLE_SIZE, loc="left", parse_math=False)


def share(panels: Sequence[Axes], least: float = -np.inf, most: float = np.inf) -> None:
    """Give all panels the same vertical axis, a little longer than what they show: within these bounds, but for bars.

    Horizontal axes have to have their limits before.
    """
    ends = [end for axes in panels for end in axes.dataLim.intervaly if np.isfinite(end)]
    if not ends:
        return
    low, high = min(ends), max(ends)
    room = max(0.06 * (high - low), 0.5)
    for axes in panels:
        axes.set_ylim(min(low, max(least, low - room)), max(high, min(most, high + room)))
        left, right = axes.get_xlim()
        for line in axes.lines:
            # A marker at 100 is drawn whole; a bar that reaches beyond the sides is clipped.
            at = np.asarray(line.get_xdata(), dtype=float)
            line.set_clip_on(bool(np.any((at < left) | (at > right))))


def ticks(axes: Axes, values: Sequence[float], log_base: float | None = None) -> None:
    """Set a tick at each value that was run, as the user typed it; the axis is logarithmic if `log_base` is given."""
    if log_base and min(values) > 0:
        axes.set_xscale("log", base=log_base)
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(values))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(float(f"{value:.6g}"))))


def legend(figure: Figure, looks: Mapping[str, selection.Look], more: Sequence[Artist] = ()) -> None:
    """Draw one legend below all panels: `looks` (name -> how its line looks), then `more`, which have own labels."""
    handles = [*(Line2D([], [], label=name, **look) for name, look in looks.items()), *more]
    if not handles:
        return
    for handle in handles:
        handle.set_label(textwrap.fill(str(handle.get_label()), int(0.9 * selection.CHARACTERS)))
    for columns in range(min(4, len(handles)), 0, -1):
        below = figure.legend(
            handles=handles, ncols=columns, loc="outside lower center", frameon=False, fontsize=selection.TEXT_SIZE
        )
        for entry in below.get_texts():
            entry.set_parse_math(False)
        if columns == 1 or below.get_window_extent().width <= figure.bbox.width:
            return
        below.remove()
