"""The numbers that the papers print, as printed, with the setting of each in our own keys; README.md beside this says
which tables these are and what the copies of the papers have lost."""

from __future__ import annotations

from importlib.resources import files

import pandas as pd

from fcl_bench.errors import require_choice

#: A row a number. `method`, `metric`, `data` and `backbone` are our own names where we have the same thing.
COLUMNS = (
    *("table", "row", "column", "method", "metric", "value", "spread", "unit"),
    *("data", "backbone", "tasks", "clients", "beta", "setting"),
)


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
    tables = {
        file.name.removesuffix(".csv"): file for file in files(__package__).iterdir() if file.name.endswith(".csv")
    }
    if paper is not None:
        require_choice("paper", paper, tables)
    frames = []
    for name in sorted(tables) if paper is None else [paper]:
        with tables[name].open(encoding="utf-8") as file:
            # As text: neither "n/a" nor "" is to become NaN, nor 37.50 a number.
            frame = pd.read_csv(file, dtype=str, keep_default_na=False)
        frames.append(
            frame.assign(paper=name, number=_numbers(frame["value"]), spread_number=_numbers(frame["spread"]))
        )
    return pd.concat(frames, ignore_index=True)


def _numbers(cells: pd.Series) -> pd.Series:
    """Text -> floats; thousands may be set apart by commas.

    Raises:
        ValueError: a cell that is neither a number nor one of the things a paper prints in a number's place.
    """
    none = cells.isin(["", "n/a"]) | cells.str.match(r"[<>≤≥]")
    return cells.where(~none, "nan").str.replace(",", "").astype(float)
