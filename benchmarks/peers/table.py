"""The table of what was measured, and the rows in which ours is slower or needs more memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.peers.measure import Measured
from benchmarks.peers.settings import Row
from benchmarks.peers.sides import OURS, SIDES

HEAD = ("row", "side", "processor seconds", "ours / theirs", "MiB", "ours / theirs", "results apart")


def markdown(rows: list[tuple[Row, list[Measured]]]) -> str:
    """A line for each side of each row; seconds and ratios are medians, with the least and the most in brackets."""
    lines = [_line(HEAD), _line(["---", "---", *["---:"] * 5])]
    for row, sides in rows:
        ours = sides[0]
        for own in sides:
            first = own is ours
            lines.append(
                _line(
                    [
                        str(row) if first else "",
                        SIDES[own.side].title,
                        spread(own.seconds, ".3g"),
                        "" if first else spread(own.ratios(ours), ".2f"),
                        f"{own.bytes / 2**20:.0f}",
                        "" if first else f"{_share(ours.bytes, own.bytes):.2f}",
                        "" if first else f"{own.apart:.1g}",
                    ]
                )
            )
    return "\n".join(lines) + "\n"


def losses(rows: list[tuple[Row, list[Measured]]]) -> Iterator[str]:
    """One sentence for each side beside which ours is slower by the median ratio, or needs more memory."""
    for row, (ours, *others) in rows:
        for own in others:
            slower, more = statistics.median(own.ratios(ours)), _share(ours.bytes, own.bytes)
            if slower > 1:
                yield f"{row}: {OURS.title} needs {slower:.2f} times the processor seconds of {SIDES[own.side].title}."
            if more > 1:
                yield f"{row}: {OURS.title} needs {more:.2f} times the memory of {SIDES[own.side].title}."


def disagreements(rows: list[tuple[Row, list[Measured]]]) -> Iterator[str]:
    """One sentence for each side that did not do the same as ours."""
    for row, (_, *others) in rows:
        for own in others:
            if not own.apart <= row.tolerance:
                yield (
                    f"{row}: the result of {SIDES[own.side].title} is {own.apart:.2g} away from ours, as a share of"
                    f" its length; at most {row.tolerance:g} is rounding, so their seconds are not of the same work."
                )


def spread(values: list[float], digits: str) -> str:
    """Median (least to most), each in this format."""
    told = (format(value, digits) for value in (statistics.median(values), min(values), max(values)))
    return "{} ({} to {})".format(*told)


def _share(ours: int, theirs: int) -> float:
    return ours / theirs if theirs > 0 else float("inf")


def _line(cells: object) -> str:
    return f"| {' | '.join(cells)} |"  # type: ignore[arg-type]
