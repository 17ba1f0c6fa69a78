"""For each table of a paper: the printed number, our result in exactly its setting, and the difference."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fcl_bench.config import text
from fcl_bench.engine.json_file import read_json
from fcl_bench.errors import UserError, choices
from fcl_bench.papers.experiments import MINIATURE, stand_ins
from fcl_bench.papers.matching import (
    LOST_METHOD,
    NO_METHOD,
    STATED,
    Matcher,
    groups_of,
    left_to_us,
    overrides,
    settings_of,
    words_without_key,
)
from fcl_bench.papers.nominal import SIZES, as_sent, nominal
from fcl_bench.papers.printed import lost_megabytes, notes, printed
from fcl_bench.papers.sheet import (
    HAS_RUNS,
    NO_EXPERIMENT,
    NO_METRIC,
    OURS,
    paper_sheet,
    paper_values,
)
from fcl_bench.results.measures import BEST_ROUND, by_task, direction
from fcl_bench.results.summarise import gates_of
from fcl_bench.results.tables.cells import NOT_RUN, NOTHING, Table

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


def paper_tables(cells: pd.DataFrame, runs: pd.DataFrame, folder: Path, profile: str = "full") -> Iterator[Table]:
    """Yield the tables of `cells`, one after the other.

    Args:
        cells: the result of `printed_cells`.
        runs: the result of `used_runs`; may be empty.
        folder: the folder that holds the run folders.
        profile: "full" for runs of the printed settings, "quick" for runs of the experiments' miniatures of them.
    """
    matcher = Matcher(runs, folder)
    for (paper, table), group in cells.groupby(["paper", "table"], sort=False):
        yield _table(paper, table, group.reset_index(drop=True), runs, matcher, profile == "quick")


def _table(paper: str, table: str, cells: pd.DataFrame, runs: pd.DataFrame, matcher: Matcher, quick: bool) -> Table:
    lines: list[dict[str, Any]] = []
    behind: list[dict[str, Any]] = []
    compared: set[Any] = set()
    for position, cell in cells.iterrows():
        state = _state(cell)
        differences: dict[Any, list[str]] = {}
        command: dict[str, str] = {}
        if not state and quick:
            stands = stand_ins(cell, settings_of(overrides(cell)))
            state = "" if stands else NO_EXPERIMENT
            differences = {index: [] for _, settings in stands for index in matcher.exactly(settings, cell["metric"])}
            command = {"command": f"fcl-bench {shlex.join(stands[0][0])}" if stands else NOTHING}
        elif not state:
            differences = matcher.differences(cell)
        left_open = [key for key in STATED if not cell[key]]
        # A miniature has no printed setting that it could be taken for.
        same = [] if quick else [index for index, differing in differences.items() if not differing]
        doubted = {index: matcher.doubts(runs.loc[index, "folder"]) for index in same}
        found = groups_of(differences, runs, left_open, doubted) or {"": []}
        used: set[Any] = set()
        for at, matching in found.items():
            indices = _newest(runs.loc[matching])
            used.update(indices)
            chosen = [text(runs.loc[indices[0], key]) for key in left_open] if indices else []
            line = {"cell": position, "at": _where(cell, at), "open": ", ".join(chosen)}
            line |= {"state": state or (HAS_RUNS if indices else NOT_RUN)}
            line |= {"doubts": doubted.get(indices[0], "") if indices else ""}
            counted = {"nominal": nominal(cell), "as_sent": as_sent(cell)}
            lines.append(line | command | counted | _ours(cell, runs.loc[indices]))
        compared |= used
        for index, differing in differences.items():
            known = {key: cell[key] for key in ("row", "column", "metric")}
            known |= {key: runs.loc[index, key] for key in ("run_id", "seed", "device", "protocol")}
            nothing = "nothing" if index in used else "nothing; a newer run of its seed counts"
            told = [*differing, doubted.get(index, "")] if differing or doubted.get(index) else [nothing]
            behind.append({**known, "used": index in used, "differs": "; ".join(filter(None, told))})
    # It is NaN where nothing is counted.
    frame = pd.DataFrame(lines).astype({"nominal": float, "as_sent": float})
    title, footnotes = f"{paper}, {table}", notes(paper, table, frame["nominal"].notna().any())
    footnotes += _partitions(runs.loc[[position for position in runs.index if position in compared]])
    if quick:
        title, footnotes = f"{title}, in miniature", [MINIATURE, *footnotes]
    whole = cells.loc[frame["cell"]].reset_index(drop=True)
    return Table(
        "-".join(re.findall(r"\w+", f"{paper} {table}".lower())),
        paper_sheet(title, whole, frame, footnotes),
        paper_values(whole, frame),
        pd.DataFrame(behind, columns=list(_RUNS)),
    )


def _partitions(runs: pd.DataFrame) -> list[str]:
    """Return the paragraph on how skewed the partitions of runs are; none where no record says it."""
    told: dict[str, dict[str, str]] = {}
    for _, run in runs.iterrows():
        found = read_json(Path(run["path"]) / "run.json").get(
            "partition_skew", {}
        )  # records of earlier versions have none
        if found.get("total_variation") is None:
            continue
        beta = f" beta {text(run['beta'])}" if text(run["beta"]) else ""
        setting = f"{run['data']}, {run['partition']}{beta}, {run['clients']} clients, {run['tasks']} tasks"
        rank = "" if found["percentile"] is None else f" ({found['percentile']:g})"
        told.setdefault(setting, {})[f"seed {run['seed']}"] = f"{found['total_variation']:.3f}{rank}"
    lines = [f"{setting}: {', '.join(map(' '.join, seeds.items()))}" for setting, seeds in told.items()]
    return [f"{_PARTITIONS} {'; '.join(lines)}."] if lines else []


def _newest(runs: pd.DataFrame) -> list[Any]:
    """Return the index of the newest run of each seed: runs that differ in keys that are free measure the same."""
    if runs.empty:
        return []
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
    for (device, protocol), part in runs.groupby(["device", "protocol"]) if len(runs) else ():
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
