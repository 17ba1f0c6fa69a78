"""For each table of a paper: the printed number, ours in exactly its setting, and the difference, for readers too."""

from __future__ import annotations

import re
import shlex
from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fcl_bench.config import text
from fcl_bench.errors import UserError, choices
from fcl_bench.files import read_json
from fcl_bench.papers.matching import (
    LOST_METHOD,
    NO_METHOD,
    STATED,
    Matcher,
    groups_of,
    left_to_us,
    overrides,
    words_without_key,
)
from fcl_bench.papers.nominal import SIZES, as_sent, nominal
from fcl_bench.papers.printed import lost_megabytes, notes, printed
from fcl_bench.results.best import Verdict, judged, remarks
from fcl_bench.results.measures import BEST_ROUND, by_task, direction
from fcl_bench.results.summarise import CEILINGS, gates_of, signature
from fcl_bench.results.tables.cells import NOT_DEFINED, NOT_RUN, NOTHING, Cell, Sheet, Table, mean_cell

#: The state of a line that has runs, and some states of lines that cannot have any.
HAS_RUNS = "run"
NO_METRIC = "not a metric of ours"
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
    remark = remarks((cells["row"][position], verdict) for of in found.values() for position, verdict in of.items())
    return Sheet(title, headers, rows, headers.index("printed"), [*notes, *([remark] if remark else [])])


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
    values["command"] = pd.Series(typed, values.index, dtype=object).where(runs, NOTHING)
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


#: The bytes that were really sent, shown beside the paper's count.
_SENT = {"measured, a task": "up_max_mib", "measured, all tasks": "up_total_max_mib"}
_PARTITIONS = (
    "Total variation between the classes of a client and of its task, mean over clients and tasks of our runs, and"
    " percentile among other draws of the partition (docs/reference/partitions.md):"
)
_RUNS = ("row", "column", "metric", "run_id", "seed", "device", "protocol", "used", "differs")


def printed_cells(paper: str, table: str | None = None) -> pd.DataFrame:
    """Return the printed numbers of a paper ("all" for every paper), or of one of its tables, one per row.

    Raises:
        UserError: there is no such paper or table.
    """
    cells = pd.concat([lost_megabytes(), printed()], ignore_index=True)
    names = sorted(cells["paper"].unique())
    if paper not in ("all", *names):
        raise UserError(f"--paper {paper} is not known", choices(["all", *names], paper))
    cells = cells if paper == "all" else cells[cells["paper"] == paper]
    if table is not None:
        tables = list(cells["table"].unique())
        if table not in tables:
            raise UserError(f"--table {table} is not in --paper {paper}", choices(tables, table))
        cells = cells[cells["table"] == table]
    by_name = ["paper", "table"]
    return cells.sort_values(by_name, key=lambda names: names.map(_natural), kind="stable", ignore_index=True)


def paper_tables(cells: pd.DataFrame, runs: pd.DataFrame, folder: Path) -> Iterator[Table]:
    """Yield the tables of `cells`, one after the other.

    Args:
        cells: the result of `printed_cells`.
        runs: the result of `used_runs`; may be empty.
        folder: the folder that holds the run folders.
    """
    matcher = Matcher(runs, folder)
    for (paper, table), group in cells.groupby(["paper", "table"], sort=False):
        yield _table(paper, table, group.reset_index(drop=True), runs, matcher)


def _table(paper: str, table: str, cells: pd.DataFrame, runs: pd.DataFrame, matcher: Matcher) -> Table:
    lines: list[dict[str, Any]] = []
    behind: list[dict[str, Any]] = []
    compared: set[Any] = set()
    for position, cell in cells.iterrows():
        state = _state(cell)
        differences = {} if state else matcher.differences(cell)
        left_open = [key for key in STATED if not cell[key]]
        same = [index for index, differing in differences.items() if not differing]
        doubted = {index: matcher.doubts(runs.loc[index, "folder"]) for index in same}
        found = groups_of(differences, runs, left_open, doubted) or {"": []}
        used: set[Any] = set()
        for at, matching in found.items():
            indices = _newest(runs.loc[matching]) if matching else []
            used.update(indices)
            chosen = [text(runs.loc[indices[0], key]) for key in left_open] if indices else []
            line = {"cell": position, "at": _where(cell, at), "open": ", ".join(chosen)}
            line |= {"state": state or (HAS_RUNS if indices else NOT_RUN)}
            line |= {"doubts": doubted.get(indices[0], "") if indices else ""}
            counted = {"nominal": nominal(cell), "as_sent": as_sent(cell)}
            lines.append(line | counted | (_ours(cell, runs.loc[indices]) if indices else {}))
        compared |= used
        for index, differing in differences.items():
            known = {key: cell[key] for key in ("row", "column", "metric")}
            known |= {key: runs.loc[index, key] for key in ("run_id", "seed", "device", "protocol")}
            nothing = "nothing" if index in used else "nothing; a newer run of its seed counts"
            reasons = [*differing, doubted.get(index, "")] if differing or doubted.get(index) else [nothing]
            behind.append({**known, "used": index in used, "differs": "; ".join(filter(None, reasons))})
    # It is NaN where nothing is counted.
    frame = pd.DataFrame(lines).astype({"nominal": float, "as_sent": float})
    title, footnotes = f"{paper}, {table}", notes(paper, table, frame["nominal"].notna().any())
    footnotes += _partitions(runs.loc[[position for position in runs.index if position in compared]])
    whole = cells.loc[frame["cell"]].reset_index(drop=True)
    return Table(
        "-".join(re.findall(r"\w+", f"{paper} {table}".lower())),
        paper_sheet(title, whole, frame, footnotes),
        paper_values(whole, frame),
        pd.DataFrame(behind, columns=list(_RUNS)),
    )


def _partitions(runs: pd.DataFrame) -> list[str]:
    """Return the paragraph on how skewed the partitions of runs are; none where no record says it."""
    skews: dict[str, dict[str, str]] = {}
    for _, run in runs.iterrows():
        found = read_json(Path(run["path"]) / "run.json")["partition_skew"]
        if found["total_variation"] is None:
            continue
        beta = f" beta {text(run['beta'])}" if text(run["beta"]) else ""
        setting = f"{run['data']}, {run['partition']}{beta}, {run['clients']} clients, {run['tasks']} tasks"
        rank = "" if found["percentile"] is None else f" ({found['percentile']:g})"
        skews.setdefault(setting, {})[f"seed {run['seed']}"] = f"{found['total_variation']:.3f}{rank}"
    lines = [f"{setting}: {', '.join(map(' '.join, seeds.items()))}" for setting, seeds in skews.items()]
    return [f"{_PARTITIONS} {'; '.join(lines)}."] if lines else []


def _newest(runs: pd.DataFrame) -> list[Any]:
    """Return the index of the newest run of each seed: runs that differ in keys that are free measure the same."""
    newest = runs.sort_values("written", kind="stable").drop_duplicates(["device", "protocol", "seed"], keep="last")
    return list(newest.index.sort_values())


def _where(cell: pd.Series, at: str) -> str:
    """Return the values of what the paper leaves open, what else it does not say, and who chose the round."""
    chosen = [BEST_ROUND] if cell["metric"] == "A_T_best" else []
    return "; ".join(filter(None, [at, *chosen, *left_to_us(cell["setting"])]))


def _state(cell: pd.Series) -> str:
    """Return why no run can be compared with a printed number; "" if one can."""
    words = words_without_key(cell["setting"])
    if not cell["method"]:
        why = [word for word in words if word == LOST_METHOD or word.startswith(NO_METHOD)]
        return why[0] if why else NO_METHOD
    if words:
        return f"no key for: {'; '.join(words)}"
    if missing := [key for key in ("data", "backbone") if not cell[key]]:
        return f"the paper does not say: {', '.join(missing)}"
    return "" if cell["metric"] in SIZES or direction(cell["metric"]) else NO_METRIC


def _natural(name: str) -> tuple[str, ...]:
    """Return a sort key that puts Table 2 before Table 10, and figures after tables."""
    kind, _, number = name.partition(" ")
    return (str(kind == "Figure"), kind, *(part.rjust(6) for part in number.split(".")))


def _ours(cell: pd.Series, runs: pd.DataFrame) -> dict[str, Any]:
    """Return mean, standard deviation, n and gates of the runs, separately for each device and protocol."""
    columns = _SENT if cell["metric"] in SIZES else {OURS: cell["metric"]}
    found: dict[str, Any] = {}
    for (device, protocol), part in runs.groupby(["device", "protocol"]):
        for column, metric in columns.items():
            numbers = _values(part, metric) / _unit(cell, part)
            name = f"{column}, {device}, {protocol}"
            found[f"{name} mean"] = float(numbers.mean())
            found[f"{name} std"] = float(numbers.std(ddof=1)) if len(numbers) > 1 else np.nan
            found[f"{name} n"] = len(numbers)
            found[f"{name} gates"] = gates_of(part)
            found[f"{name} runs"] = dict(zip(part["seed"], zip(numbers, part["path"], strict=True), strict=True))
    return found


def _unit(cell: pd.Series, runs: pd.DataFrame) -> Any:
    """Return by what our numbers are divided: percent for shares, and the models of a task for that of one round."""
    if cell["metric"].startswith("model_mib"):
        return runs["method.training.rounds"].to_numpy(float)
    return 100.0 if cell["unit"] == "share" else 1.0


def _values(runs: pd.DataFrame, metric: str) -> np.ndarray:
    """Return a metric per run, NaN where not defined; `task_aware.A_T_tasks` is A_T_tasks in that part of a record."""
    part, _, name = metric.rpartition(".")
    if single := by_task(name):
        return np.array([single.of(read_json(Path(path, "run.json")), part) for path in runs["path"]], dtype=float)
    if not part:
        return runs[name].to_numpy(float)
    return np.array([read_json(Path(path, "run.json")).get(part, {}).get(name) for path in runs["path"]], dtype=float)
