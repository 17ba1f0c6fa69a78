"""The numbers that the papers print, as printed, with the setting of each in our own keys; README.md beside this says
what the columns are, each paper's own README.md which tables are kept and what the copy of the paper has lost."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fcl_bench.errors import require_choice

#: A row a number. `method`, `metric`, `data` and `backbone` are our own names where we have the same thing.
COLUMNS = (
    *("table", "row", "column", "method", "metric", "value", "spread", "unit"),
    *("data", "backbone", "tasks", "clients", "beta", "setting"),
)


def paper_files(name: str) -> dict[str, Path]:
    """Paper -> the file of this name in its folder, of the papers that have it, ascending."""
    return {file.parent.name: file for file in sorted(Path(__file__).parent.glob(f"*/{name}"))}


def printed(paper: str | None = None) -> pd.DataFrame:
    """The printed numbers of one paper, or of all of them one after the other.

    Every column of `COLUMNS` is text as it stands in the file, "" where nothing is printed, so that trailing zeros are
    kept. Added are `paper`, and as floats `number` and `spread_number`: `value` and `spread` in the row's `unit`, NaN
    where that is no number (nothing, "n/a") or only a bound on one ("> 10").

    Args:
        paper: fedran, stsa, afl, afcl or fedprotip; None: all.

    Raises:
        UserError: a paper of which no numbers are kept.
    """
    tables = paper_files("printed.csv")
    if paper is not None:
        require_choice("paper", paper, tables)
        tables = {paper: tables[paper]}
    return pd.concat([_numbers_of(name, file) for name, file in tables.items()], ignore_index=True)


def lost_megabytes() -> pd.DataFrame:
    """Table 4's megabytes of FedRAN and STSA-E, lost in the copy, as the project's specification lists them.

    The columns are those of `printed`.
    """
    return _numbers_of("fedran", paper_files("specified.csv")["fedran"])


def _numbers_of(paper: str, file: Path) -> pd.DataFrame:
    # As text: neither "n/a" nor "" is to become NaN, nor 37.50 a number.
    frame = pd.read_csv(file, dtype=str, keep_default_na=False)
    return frame.assign(paper=paper, number=_floats(frame["value"]), spread_number=_floats(frame["spread"]))


def _floats(cells: pd.Series) -> pd.Series:
    """Text -> floats; thousands may be set apart by commas.

    Raises:
        ValueError: a cell that is neither a number nor one of the things a paper prints in a number's place.
    """
    none = cells.isin(["", "n/a"]) | cells.str.match(r"[<>≤≥]")
    return cells.where(~none, "nan").str.replace(",", "").astype(float)
