"""What a table is, whatever it is written as: headers, cells with marks, and what stands for the absent."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import pandas as pd

from fcl_bench.results.measures import Measure

#: In place of a value: nobody ran it; it was run and the value is not defined (forgetting of a single task).
NOT_RUN = "not run"
NOT_DEFINED = "not defined"
#: Where nothing can be said: a difference from a number that there is not.
NOTHING = "-"
#: `pandas.read_csv(FILE, na_values=ABSENT)` gives every column of numbers as numbers.
ABSENT = [NOT_RUN, NOT_DEFINED, NOTHING]

#: Content and mark ("", "bold" or "underline") of one cell.
Cell = tuple[str, str]


@dataclass
class Sheet:
    """A table ready for Markdown and LaTeX. No cell is empty.

    Attributes:
        title: one line.
        headers: of the columns.
        rows: the cells.
        texts: how many columns from the left are text; the others are numbers, set to the right.
        notes: paragraphs below it.
    """

    title: str
    headers: list[str]
    rows: list[list[Cell]]
    texts: int
    notes: list[str] = field(default_factory=list)


def number(value: float, measure: Measure) -> str:
    """A mean as tables print it: percents with two decimals, sizes and times below 1 with three digits that count."""
    return f"{value:.{decimals(value, measure)}f}"


def decimals(value: float, measure: Measure) -> int:
    """How many of them `number` prints."""
    small = not measure.plain and 0 < value < 1
    return 2 - math.floor(math.log10(value)) if small else 2


def mean_and_spread(mean: float, std: float, places: int) -> str:
    """ "73.33 ± 3.51"; without the second part for a single run."""
    # An exact zero is not one that was rounded: sizes often are the same for every seed.
    spread = "" if math.isnan(std) else " ± 0" if std == 0 else f" ± {std:.{places}f}"
    return f"{mean:.{places}f}{spread}"


def best_and_second(printed: Iterable[str], higher: bool) -> list[str]:
    """The mark of each of the competitors: "bold" for the best, "underline" for the second, "" for the others.

    Values that print alike are marked alike. A single one wins nothing.

    Args:
        printed: numbers as the table prints them, those not to be marked as "".
    """
    texts = list(printed)
    values = sorted({float(text) for text in texts if text}, reverse=higher)[:2]
    if sum(map(bool, texts)) < 2:
        return [""] * len(texts)
    marks = dict(zip(values, ("bold", "underline"), strict=False))
    return [marks.get(float(text), "") if text else "" for text in texts]


def marked_by_group(printed: pd.Series, groups: pd.Series, higher: bool) -> pd.Series:
    """`best_and_second` within each of `groups`, which has the index of `printed`."""
    marks = pd.Series("", printed.index, dtype=object)
    for _, texts in printed.groupby(groups):
        marks[texts.index] = best_and_second(texts, higher)
    return marks
