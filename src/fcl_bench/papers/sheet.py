"""A paper's table with our numbers beside it, for readers and for programs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import pandas as pd

from fcl_bench.papers.matching import LOST_METHOD, NO_METHOD, STATED, overrides
from fcl_bench.papers.nominal import SIZES
from fcl_bench.results.best import Verdict, judged, remarks
from fcl_bench.results.measures import direction
from fcl_bench.results.summarise import CEILINGS, signature
from fcl_bench.results.tables.cells import NOT_DEFINED, NOT_RUN, NOTHING, Cell, Sheet, mean_cell

#: The state of a line that has runs, and some states of lines that cannot have any.
HAS_RUNS = "run"
NO_METRIC = "not a metric of ours"
NO_EXPERIMENT = "in no experiment"
#: The column of runs with which a printed number is compared; other columns of runs stand beside it.
OURS = "ours"
_NOT_COUNTED = "not counted here"
_NO_CELL = Cell(NOTHING, absent=True)
_KEPT = ["paper", "table", "row", "column", "method", "metric", "unit", "data", "backbone", *STATED, "setting"]


def paper_sheet(title: str, cells: pd.DataFrame, lines: pd.DataFrame, notes: list[str]) -> Sheet:
    """Return the table for readers.

    Args:
        title: the table's title.
        cells: the printed number of each line; one has several lines where runs differ in what the paper leaves open.
        lines: with the same index: `cell` (the same for lines of one printed number), `open` (values of what the paper
            leaves open), `at` (these, and remarks on ours), `state`, `doubts` (why the runs are not known to have the
            printed setting: they do not compete and are not compared), `nominal`, `as_sent`, and for each column of
            runs `<column> mean`, `... std`, `... n`, `... gates`, `... runs` (see `judged`); NaN where there is none.
        notes: paragraphs below the table.
    """
    parts, counts, is_open = _parts(lines), _counts(lines), lines["at"].ne("").any()
    headers = ["row", "column", *(["where"] if is_open else []), "unit", "printed"]
    headers += ["counted here", "difference", "a task as sent (MiB)"] if counts else []
    for part in parts:
        headers += [f"{part} (n)", *([part.replace(OURS, "difference", 1)] if part.startswith(OURS) else [])]
    headers += [] if parts else ["our runs"]
    found = {part: _verdicts(cells, lines, part) for part in parts if part.startswith(OURS)}
    rows: list[list[Cell]] = []
    for position, cell in cells.iterrows():
        line = lines.loc[position]
        row = [Cell(cell["row"]), Cell(cell["column"])]
        row += [_text(line["at"])] if is_open else []
        row += [_text(cell["unit"]), _printed(cell)]
        row += _counted(line, cell) if counts else []
        for part in parts:
            row += _measured(line, cell, part, found.get(part, {}).get(position, Verdict()))
        absent = line["state"].startswith((NOT_RUN, NO_METHOD, LOST_METHOD))
        row += [] if parts else [Cell(line["state"], absent=absent)]
        rows.append(row)
    said = remarks((cells["row"][position], verdict) for of in found.values() for position, verdict in of.items())
    return Sheet(title, headers, rows, headers.index("printed"), [*notes, *([said] if said else [])])


def paper_values(cells: pd.DataFrame, lines: pd.DataFrame) -> pd.DataFrame:
    """Return the table for programs: no cell is empty, and each number has its command. See `paper_sheet`."""
    values = cells[_KEPT].assign(at=lines["at"], printed=cells["value"], printed_spread=cells["spread"])
    values = values.replace("", NOTHING)
    values["printed_number"] = cells["number"]
    if _counts(lines):
        values["nominal"] = lines["nominal"]
        values["nominal_difference"] = lines["nominal"] - cells["number"]
        values["as_sent_mib"] = lines["as_sent"]
    values = values.astype(object).where(values.notna(), NOTHING)
    for part in _parts(lines):
        own = lines[[f"{part} {name}" for name in ("mean", "std", "n")]].copy()
        if part.startswith(OURS):
            own[f"{part} difference"] = (own[f"{part} mean"] - cells["number"]).mask(lines["doubts"] != "")
        has_run = own[f"{part} n"].notna()
        belongs = [_belongs(cell, part) for _, cell in cells.iterrows()]
        absent = np.select([has_run, belongs], [NOT_DEFINED, NOT_RUN], NOTHING)
        values = values.join(own.astype(object).where(own.notna(), pd.Series(absent, own.index), axis=0))
    values["state"] = lines["state"].where(lines["doubts"] == "", lines["state"] + ": " + lines["doubts"])
    runs = lines["state"].isin([HAS_RUNS, NOT_RUN])
    typed = [f"fcl-bench -m {shlex.join(overrides(cell))} seed=0,1,2" for _, cell in cells.iterrows()]
    commands = pd.Series(typed, values.index, dtype=object)
    # In miniature, a line has its own command.
    commands = lines["command"].fillna(commands) if "command" in lines else commands
    values["command"] = commands.where(runs, NOTHING)
    return values


def _parts(lines: pd.DataFrame) -> list[str]:
    """Return the columns of runs that exist, such as "ours, cpu, task-agnostic"."""
    return [column.removesuffix(" n") for column in lines if column.endswith(" n")]


def _counts(lines: pd.DataFrame) -> bool:
    return bool(lines["nominal"].notna().any())


def _belongs(cell: pd.Series, part: str) -> bool:
    """Return whether a column of runs fits the cell's metric: what was sent, or our measure for the paper's metric."""
    return part.startswith(OURS) != (cell["metric"] in SIZES)


def _text(words: str) -> Cell:
    return Cell(words) if words else _NO_CELL


def _printed(cell: pd.Series) -> Cell:
    """Return the printed number, never marked: it is a rounded mean of unknown runs."""
    shown = f"{cell['value']} ± {cell['spread']}" if cell["spread"] else cell["value"]
    return Cell(shown, number=None if np.isnan(cell["number"]) else float(cell["number"]))


def _counted(line: pd.Series, cell: pd.Series) -> list[Cell]:
    """Return the count that needs no run, its difference from the printed number, and one task as sent."""
    sent = _NO_CELL if np.isnan(line["as_sent"]) else mean_cell(line["as_sent"], np.nan, 2)
    if np.isnan(line["nominal"]):
        return [Cell(_NOT_COUNTED, absent=True), _NO_CELL, sent]
    return [mean_cell(line["nominal"], np.nan, _places(cell)), _difference(line["nominal"], cell), sent]


def _measured(line: pd.Series, cell: pd.Series, part: str, verdict: Verdict) -> list[Cell]:
    """Return one column of runs; for ours, also the difference from the printed number."""
    n, mean = line[f"{part} n"], line[f"{part} mean"]
    if np.isnan(n):
        state = NOT_RUN if line["state"] == HAS_RUNS else line["state"]
        shown = Cell(state, absent=True) if _belongs(cell, part) else _NO_CELL
    elif np.isnan(mean):
        shown = Cell(f"{NOT_DEFINED} ({n:.0f})", absent=True)
    else:
        places = max(2, _places(cell))
        shown = replace(mean_cell(mean, line[f"{part} std"], places, verdict.mark, n), title=verdict.why)
        if gates := line[f"{part} gates"]:
            shown = replace(shown, text=f"{shown.text} [gate: {gates}]")
        if line["doubts"]:
            # Without its number, so that nothing else compares it either.
            shown = replace(shown, text=f"{shown.text} [{line['doubts']}]", number=None)
    return [shown, *([_difference(np.nan if line["doubts"] else mean, cell)] if part.startswith(OURS) else [])]


def _difference(ours: float, cell: pd.Series) -> Cell:
    """Return ours minus printed, with the printed decimals; a difference that rounds to zero is +0.00."""
    if np.isnan(ours) or np.isnan(cell["number"]):
        return _NO_CELL
    rounded = round(float(ours - cell["number"]), _places(cell)) + 0.0
    return Cell(f"{rounded:+.{_places(cell)}f}", number=rounded)


def _places(cell: pd.Series) -> int:
    return 3 if cell["unit"] == "share" else len(cell["value"].partition(".")[2])


def _verdicts(cells: pd.DataFrame, lines: pd.DataFrame, part: str) -> dict[Hashable, Verdict]:
    """Return, per line, how a column of runs stands beside the best of its column and setting.

    Only metrics whose better direction is known are compared. See `paper_sheet`.
    """
    sound = lines[f"{part} gates"].eq("") & (lines["doubts"] == "") & ~cells["method"].isin(CEILINGS)
    # The problem that the methods solve, without how they solve it.
    task = [re.sub(r'"[^"]*"|\b(method|adapt)\S*', "", setting).strip() for setting in cells["setting"]]
    whole = cells.assign(task=task, open=lines["open"])
    found: dict[Hashable, Verdict] = {}
    for _, rows in whole.groupby(signature(whole, ["column", "metric", "data", *STATED, "open", "task"]), sort=False):
        metric = rows["metric"].iloc[0]
        if (known := direction(metric)) is not None:
            runs = [lines.loc[line, f"{part} runs"] if sound[line] else None for line in rows.index]
            found |= zip(rows.index, judged(runs, metric, known.higher), strict=True)
    return found
