"""What a table is, whatever it is written as: headers, cells, and what stands for the absent."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from fcl_bench.config import is_number, text
from fcl_bench.results.measures import Measure

#: In place of a value: nobody ran it; it was run and the value is not defined (forgetting of a single task).
NOT_RUN = "not run"
NOT_DEFINED = "not defined"
#: Where nothing can be said: a difference from a number that there is not.
NOTHING = "-"
#: `pandas.read_csv(FILE, na_values=ABSENT)` gives every column of numbers as numbers.
ABSENT = [NOT_RUN, NOT_DEFINED, NOTHING]


@dataclass(frozen=True)
class Cell:
    """What Markdown, LaTeX, the terminal and the HTML page need to know of one cell.

    Attributes:
        text: what is shown; never empty.
        mark: "bold" for the best, "underline" for the second, "" otherwise.
        number: what the cell is sorted and compared by, as rounded as it is shown; None for a text.
        absent: whether the text says why there is no value.
    """

    text: str
    mark: str = ""
    number: float | None = None
    absent: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table for readers, ready to be written as Markdown, LaTeX or HTML.

    Attributes:
        title: one line.
        headers: of the columns.
        rows: the cells.
        texts: how many columns from the left are text; the others are numbers, set to the right.
        notes: paragraphs below it.
        facets: positions of the columns that say the setting; a page offers their values as choices.
    """

    title: str
    headers: list[str]
    rows: list[list[Cell]]
    texts: int
    notes: list[str] = field(default_factory=list)
    facets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Table:
    """One table in its three forms.

    Attributes:
        name: of its files.
        sheet: for readers.
        values: for programs, with whole numbers and no empty cell.
        runs: the runs behind each cell.
    """

    name: str
    sheet: Sheet
    values: pd.DataFrame
    runs: pd.DataFrame


def value_cell(value: Any) -> Cell:
    """A value of the configuration as the user types it; "none" where a run has no such key."""
    return Cell(text(value) or "none", number=float(value) if is_number(value) else None)


def mean_cell(mean: float, std: float, places: int, mark: str = "", n: float | None = None) -> Cell:
    """ "73.33 ± 3.51", with " (3)" where `n` is given; without the spread for a single run, whose `std` is NaN."""
    if math.isnan(mean):
        return Cell(NOT_DEFINED, absent=True)
    # An exact zero is not one that was rounded: sizes often are the same for every seed.
    spread = "" if math.isnan(std) else " ± 0" if std == 0 else f" ± {std:.{places}f}"
    return Cell(f"{mean:.{places}f}{spread}{'' if n is None else f' ({n:.0f})'}", mark, round(float(mean), places))


def decimals(mean: float, measure: Measure) -> int:
    """How many a table prints: two for percents, three digits that count for sizes and times below 1."""
    small = not measure.plain and 0 < mean < 1
    return 2 - math.floor(math.log10(mean)) if small else 2


def best_and_second(printed: pd.Series, groups: pd.Series, higher: bool) -> pd.Series:
    """The mark of each number: "bold" for the best of its group, "underline" for the second, "" for the others.

    Args:
        printed: numbers as rounded as the table prints them, since what prints alike is marked alike; NaN: not marked.
        groups: within which they compete, of the same index. A single number of a group wins nothing.
        higher: whether more is better.
    """
    grouped = printed.groupby(groups)
    places = grouped.rank("dense", ascending=not higher).where(grouped.transform("count") > 1)
    return places.map({1: "bold", 2: "underline"}).astype(object).fillna("")
