"""What a table is in any format: headers, cells, and the words for absent values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fcl_bench.config import is_number, text
from fcl_bench.results.measures import Measure

if TYPE_CHECKING:
    import pandas as pd

#: Words in place of a value: there is no run; or there is one and its value is not defined (forgetting of one task).
NOT_RUN = "not run"
NOT_DEFINED = "not defined"
#: The cell where nothing can be said, such as a difference from a number that does not exist.
NOTHING = "-"
#: `pandas.read_csv(FILE, na_values=ABSENT)` reads every column of numbers as numbers.
ABSENT = [NOT_RUN, NOT_DEFINED, NOTHING]


@dataclass(frozen=True)
class Cell:
    """What Markdown, LaTeX, the terminal and the HTML page need to know of one cell.

    Attributes:
        text: the text that is shown; never empty.
        mark: "bold" for the best and what is not distinguishable from it, "" otherwise.
        number: the number by which the cell is sorted and compared, rounded as it is shown; None for a text.
        absent: whether the text says why there is no value.
        title: what a page says of the cell where the reader points at it.
    """

    text: str
    mark: str = ""
    number: float | None = None
    absent: bool = False
    title: str = ""


@dataclass(frozen=True)
class Sheet:
    """A table for readers, ready to be written as Markdown, LaTeX or HTML.

    Attributes:
        title: the title, one line.
        headers: the headers of the columns.
        rows: the cells.
        texts: the number of text columns, from the left; the others hold numbers and are right-aligned.
        notes: paragraphs below the table.
        facets: positions of the columns that describe the setting; a page offers their values as choices.
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
        name: the name of its files.
        sheet: the table for readers.
        values: the table for programs, with unrounded numbers and no empty cell.
        runs: the runs behind each cell.
    """

    name: str
    sheet: Sheet
    values: pd.DataFrame
    runs: pd.DataFrame


def value_cell(value: Any) -> Cell:
    """Return a value of the configuration as the user types it; "none" where a run has no such key."""
    return Cell(text(value) or "none", number=float(value) if is_number(value) else None)


def mean_cell(mean: float, std: float, places: int, mark: str = "", n: float | None = None) -> Cell:
    """Return "73.33 ± 3.51", with " (3)" if `n` is given; a single run has a NaN `std` and is shown without it."""
    if math.isnan(mean):
        return Cell(NOT_DEFINED, absent=True)
    # An exact zero differs from a rounded one: sizes are often the same for every seed.
    spread = "" if math.isnan(std) else " ± 0" if std == 0 else f" ± {std:.{places}f}"
    return Cell(f"{mean:.{places}f}{spread}{'' if n is None else f' ({n:.0f})'}", mark, round(float(mean), places))


def decimals(mean: float, measure: Measure) -> int:
    """Return the number of decimals: two for percent, three significant digits for sizes and times below 1."""
    small = not measure.plain and 0 < mean < 1
    return 2 - math.floor(math.log10(mean)) if small else 2
