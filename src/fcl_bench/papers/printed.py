"""The numbers that the papers print, as printed, with the setting of each in our own keys; README.md beside this says
what the columns are, each paper's own README.md which tables are kept and what the copy of the paper has lost. Its
notes.yaml says what a reader has to know of a table: its errata, what is lost, how ours is compared."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import yaml

_LEGEND = (
    "Printed: as printed. Ours: mean ± standard deviation over seeds (number of seeds) of complete runs in exactly the "
    "printed setting, every key that it does not name at its default; the difference is ours less printed. In each "
    "column and setting our best and all of ours that are not distinguishable from it are bold, ceilings and runs "
    "that meet a gate aside; printed numbers, rounded means of unknown runs, never are. Runs of unknown data, weights "
    "or code are not known to have the setting and are not compared. The command for each number is in the CSV."
)
_COUNTED = (
    "Counted here: from the method's own accounting under the paper's convention, without a run; MB of these tables "
    "are MiB. A task as sent: one task's upload at the nominal rank, in float32 and with the task's classes, the same "
    "accounting for all methods. Measured: what the busiest client of our runs sent, in MiB, in its busiest task and "
    "in all tasks; less than nominal wherever a client holds fewer samples than the rank."
)


def paper_files(name: str) -> dict[str, Path]:
    """Return paper -> the file of this name in its folder, for the papers that have it, ascending."""
    return {file.parent.name: file for file in sorted(Path(__file__).parent.glob(f"*/{name}"))}


def printed() -> pd.DataFrame:
    """Return the numbers of all papers, one paper after the other, one row per number.

    Every column of the files is text as it stands there, "" where nothing is printed, so that trailing zeros are kept.
    `method`, `metric`, `data` and `backbone` are our own names where we have the same thing. Added are `paper`, and as
    floats `number` and `spread_number`: `value` and `spread` in the row's `unit`, NaN where that is no number (nothing,
    "n/a") or only a bound on one ("> 10").
    """
    return pd.concat([_numbers_of(*paper) for paper in paper_files("printed.csv").items()], ignore_index=True)


def lost_megabytes() -> pd.DataFrame:
    """Return Table 4's megabytes of FedRAN and STSA-E, lost in the copy, as the project's specification lists them.

    The columns are those of `printed`.
    """
    return _numbers_of("fedran", paper_files("specified.csv")["fedran"])


def notes(paper: str, table: str, has_sizes: bool) -> list[str]:
    """Return the paragraphs below a table: those of the paper's notes.yaml, then what is said of any.

    Args:
        paper, table: as in `printed()`.
        has_sizes: whether any of its numbers is counted here, as a size under a paper's convention.
    """
    file = paper_files("notes.yaml").get(paper)
    own = {} if file is None else yaml.safe_load(file.read_text(encoding="utf-8"))
    return [*(own[key] for key in (table, "all tables") if key in own), _LEGEND, *([_COUNTED] if has_sizes else [])]


def _numbers_of(paper: str, file: Path) -> pd.DataFrame:
    # Cells stay text, so that "n/a" and "" do not become NaN, and 37.50 does not become a number.
    frame = pd.read_csv(file, dtype=str, keep_default_na=False)
    return frame.assign(paper=paper, number=_floats(frame["value"]), spread_number=_floats(frame["spread"]))


def _floats(cells: pd.Series) -> pd.Series:
    """Return the numbers of the texts; thousands may be set apart by commas.

    Raises:
        ValueError: a cell that is neither a number nor one of the things a paper prints in a number's place.
    """
    none = cells.isin(["", "n/a"]) | cells.str.match(r"[<>≤≥]")
    return cells.where(~none, "nan").str.replace(",", "").astype(float)
