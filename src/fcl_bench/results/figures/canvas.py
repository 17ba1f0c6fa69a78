"""The paper that figures are drawn on: a grid of panels, a caption above it, one legend below."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fcl_bench.config import text
from fcl_bench.results.figures.style import CHARACTERS, SMALL_SIZE, TEXT_SIZE, TITLE_SIZE, WIDTH_INCHES, Look

#: What figures of accuracy show, side by side, and what their axes are called.
ACCURACIES = {"A_avg": "$A_{avg}$, mean over tasks (%)", "A_T": "$A_T$, after the last task (%)"}


def canvas(
    count: int, columns: int, caption: Sequence[str], height: float = 3.3, sharex: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels in rows of `columns`, and the sentences of its caption.

    Args:
        count, columns: of panels; a last row may be short.
        caption: sentences; empty ones are left out.
        height: of a row, inches.
        sharex: whether all panels have one horizontal axis.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    lines = textwrap.wrap(" ".join(filter(None, caption)), CHARACTERS, break_on_hyphens=False)
    figure = Figure(figsize=(WIDTH_INCHES, height * rows + 0.18 * len(lines) + 0.7), layout="constrained")
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=TEXT_SIZE, parse_math=False)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=sharex).ravel()
    for axes in grid[count:]:
        axes.remove()
    for axes in grid[:count]:
        axes.tick_params(labelsize=SMALL_SIZE + 0.5, labelbottom=True, labelleft=True)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    return figure, list(grid[:count])


def title(axes: Axes, words: str, columns: int) -> None:
    """A panel's title, wrapped to its width; what a user named is no formula."""
    width = int(0.9 * CHARACTERS / columns)
    wrapped = textwrap.fill(words, width, break_on_hyphens=False)
    axes.set_title(wrapped, fontsize=TITLE_SIZE, loc="left", parse_math=False)


def ticks(axes: Axes, values: Sequence[float], log_base: float | None = None) -> None:
    """A tick at each of the values that were run, as the user typed it; on a log axis where `log_base` is given."""
    if log_base and min(values) > 0:
        axes.set_xscale("log", base=log_base)
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(values))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(float(f"{value:.6g}"))))


def legend(figure: Figure, looks: dict[str, Look], more: Sequence[Artist] = ()) -> None:
    """One legend below all panels: name -> how it is drawn, then `more` with labels of their own."""
    handles = [*(Line2D([], [], label=name, **look) for name, look in looks.items()), *more]
    if not handles:
        return
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(4, len(handles), int(1.1 * CHARACTERS) // (longest + 6)))
    below = figure.legend(handles=handles, ncols=columns, loc="outside lower center", frameon=False, fontsize=TEXT_SIZE)
    for entry in below.get_texts():
        entry.set_parse_math(False)
