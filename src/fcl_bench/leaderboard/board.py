"""A track's board: a row per method, setting and kind, and how a page and a terminal show them."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fcl_bench.config import text
from fcl_bench.execution.screen import ScreenConsole
from fcl_bench.leaderboard.store import Store
from fcl_bench.leaderboard.track import DEFAULTS, TUNED, overrides
from fcl_bench.results.best import LEGEND, Verdict, judged
from fcl_bench.results.page.page import document
from fcl_bench.results.summarise import CEILINGS, NO_PART, YARDSTICK, first_task_gate

#: Measures of the board by their names in the rows.
_NAMES = {
    **{name: name for name in ("A_T", "A_avg", "forgetting", "A_T_aware")},
    **{"up_mib": "up_total_max_mib", "down_mib": "down_max_mib", "kept_mib": "client_storage_mib"},
    **{"samples_kept": "client_samples_kept", "revealed": "revealed_percent", "steps": "client_gradient_steps"},
    **{name: name for name in ("client_seconds", "server_seconds", "rounds")},
}


def board_of(store: Store) -> dict[str, Any]:
    """The board of a track: JSON-able, numbers as they are, None for what is not known.

    In each setting rows with their defaults compete with each other, and so do tuned ones.
    """
    about, rows = store.about, []
    for number in range(len(about["settings"])):
        for kind in (DEFAULTS, TUNED):
            found = [row for row in rows_in(store, number) if row["kind"] == kind]
            competing = [results(row) if _competes(row) else None for row in found]
            verdicts = judged(competing, "A_T", higher=True, shares=store.answers.shares)
            for row, verdict in zip(found, verdicts, strict=True):
                rows.append({**{key: value for key, value in row.items() if key != "runs"}, **_distance(verdict)})
    return {
        **{key: about.get(key, "") for key in ("track", "version", "about", "data", "date", "settings", "seeds")},
        "command": shlex.join(["fcl-bench", "leaderboard", "run", about["track"], *about["typed"]]),
        "shared": _shared(about.get("shared") or [{}]),
        "conclusion": "",
        "revisions": sorted({row["git_commit"] for row in store.rows}),
        "rows": rows,
    }


def _shared(settings: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What all settings share, but for what is not there or switched off."""
    words = {
        key: text(value) or "null"
        for key, value in settings[0].items()
        if all(one.get(key) == value for one in settings)
    }
    return {
        key.removesuffix(".choice"): word for key, word in words.items() if word not in ("null", "none", "false", "0")
    }


def rows_in(store: Store, number: int) -> list[dict[str, Any]]:
    """The rows of one setting, two for each method: with its defaults and tuned; `runs` are those of the store."""
    methods = sorted({*(row["method"] for row in store.rows), *store.about["not_run"], *store.about["methods"]})
    found = [_row(store, method, kind, number) for method in methods for kind in (DEFAULTS, TUNED)]
    _gate_first_tasks(found)
    return found


def label_of(row: Mapping[str, Any]) -> str:
    """A row's name in a table."""
    return str(row["title"]) + ", tuned" * (row["kind"] == TUNED) + " (ceiling)" * row["ceiling"]


def repeats(row: Mapping[str, Any]) -> bool:
    """Whether a row has the runs of its method's defaults, since there is nothing to tune; tables leave it out."""
    return row["kind"] == TUNED and not row["tuning"]


def results(row: Mapping[str, Any]) -> dict[int, tuple[float, str]]:
    """The final accuracy of each seed and the id of its run, as `results.best` compares them."""
    return {run["seed"]: (run["A_T"], run["run_id"]) for run in row["runs"]}


def _row(store: Store, method: str, kind: str, number: int) -> dict[str, Any]:
    """One row without its distance; `runs` are the rows of the store that it is the mean of."""
    about, knobs = store.about, store.tuned(method) if kind == TUNED else {}
    # What was searched and has no knobs is tuned as it is.
    made_as = DEFAULTS if method in about["tuned"] and not knobs else kind
    setting, seeds = about["settings"][number], about["seeds"]
    there = (row for row in store.rows if (row["method"], row["kind"]) == (method, made_as) and row["seed"] in seeds)
    runs = [row for row in there if all(row[key] == value for key, value in setting.items())]
    lacks = len(runs) < len(seeds)
    typed = overrides(about["track"], method, knobs, setting, about["typed"])
    return {
        "method": method,
        **about["methods"].get(method, {"title": method, "family": "other"}),
        "kind": kind,
        "ceiling": method in CEILINGS,
        "setting": number,
        "status": "run" if runs else "not run",
        "why": _why_not(store, method, kind, len(runs)) if lacks else "",
        "n": len(runs),
        **{name: _mean(runs, measure) for name, measure in _NAMES.items()},
        **{f"{name}_std": _deviation(runs, name) for name in ("A_T", "A_avg")},
        "curve": _curve(runs),
        "gates": sorted({gate for row in runs for gate in row["gates"]}),
        "gate_texts": "; ".join(f"seed {row['seed']}: {row['gate_texts']}" for row in runs if row["gate_texts"]),
        "tuning": knobs,
        "trials": about["tuned"].get(method, {}).get("trials", 0) if kind == TUNED else 0,
        "command": shlex.join(["fcl-bench", "-m", *typed, f"seed={','.join(map(str, seeds))}"]),
        "run_ids": [row["run_id"] for row in runs],
        "commits": sorted({row["git_commit"] for row in runs}),
        "runs": runs,
    }


def _why_not(store: Store, method: str, kind: str, there: int) -> str:
    """Why a row is not whole."""
    if why := store.about["not_run"].get(method):
        return str(why)
    search = store.about["tuned"].get(method)
    if kind == TUNED and search is None:
        return "its knobs have not been searched"
    return f"{there} of {len(store.about['seeds'])} seeds are there" if there else "not run yet"


def _gate_first_tasks(rows: Iterable[dict[str, Any]]) -> None:
    """Add the gate of a first task that is far below FedAvg's, run by run."""
    rows = list(rows)
    best: dict[int, float] = {}
    for run in (run for row in rows if row["method"] == YARDSTICK for run in row["runs"]):
        best[run["seed"]] = max(run["accuracy"][0], best.get(run["seed"], 0.0))
    for row in rows:
        texts = [
            f"seed {run['seed']}: {text}"
            for run in row["runs"]
            if (text := first_task_gate(run["accuracy"][0], best.get(run["seed"], math.nan), run["first_samples"]))
        ]
        if texts:
            row["gates"] = sorted({*row["gates"], "first_task"})
            row["gate_texts"] = "; ".join(filter(None, [row["gate_texts"], *texts]))


def _competes(row: Mapping[str, Any]) -> bool:
    """Whether a row has all seeds, sees no more than clients do, and is a fair sample of its method."""
    return not row["why"] and not row["ceiling"] and not row["gates"]


def _distance(verdict: Verdict) -> dict[str, Any]:
    """The mark and the distance to the best, with its interval; None where there is none."""
    numbers = {"behind": verdict.behind, "low": verdict.low, "high": verdict.high}
    return {"mark": verdict.mark, **{key: None if math.isnan(value) else value for key, value in numbers.items()}}


def _mean(runs: Sequence[Mapping[str, Any]], measure: str) -> float | None:
    values = [row[measure] for row in runs]
    return None if None in values or not values else statistics.fmean(values)


def _curve(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """The accuracy after each task, the mean of the runs."""
    return [statistics.fmean(values) for values in zip(*(row["accuracy"] for row in runs), strict=True)]


def _deviation(runs: Sequence[Mapping[str, Any]], measure: str) -> float | None:
    return statistics.stdev(row[measure] for row in runs) if len(runs) > 1 else None


#: What the page shows of a row; the columns of `board_page`'s docstring.
_KEYS = (
    *("method", "title", "family", "kind", "ceiling", "setting", "status", "why", "n", "A_T", "A_T_std", "A_avg"),
    *("A_avg_std", "forgetting", "up_mib", "down_mib", "kept_mib", "samples_kept", "rounds", "steps"),
    *("client_seconds", "server_seconds", "revealed", "mark", "behind", "low", "high", "gates", "gate_texts", "curve"),
    *("command", "tuning", "trials", "run_ids", "commits"),
)


def board_page(board: Mapping[str, Any]) -> str:
    """Return the page of a board as text, with its styles, scripts and data inside, and a policy that forbids all else.

    Args:
        board: `track`, `version`, `about`, `data`, `date`, `command` and `conclusion` are texts (an empty conclusion
            is left out); `shared` are the settings that all rows have, `settings` those in which they differ (a list of
            mappings), `seeds` and `revisions` lists. Each of `rows` is one method in one of the `settings` (its index)
            and of one `kind` ("defaults" or "tuned"); its `status` is "run", or "not run" with the reason in `why`.
            Accuracies, `behind`, `low`, `high` (distance to the best and its 95 % interval), `forgetting` and
            `revealed` are in percent, bytes in MiB over the whole stream, `curve` is the accuracy after each task;
            `ceiling` rows get no rank. What is absent is None, NaN or not there.
    """
    rows = board["rows"]
    data = {
        **{key: board[key] for key in ("track", "settings")},
        "keys": _KEYS,
        "rows": [[_plain(row.get(key)) for key in _KEYS] for row in rows],
    }
    title = f"Leaderboard {board['track']}: {board['data']}, {board['date']}"
    return document(__package__, title, data, board=board, methods=len({row["method"] for row in rows}))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: numbers with six digits, and None for those that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


#: Names of keys in headers.
_SHORT = {"clients": "K"}
#: Below this width of a terminal the costs and the gates are in the page alone.
_NARROW = 100


def print_board(board: Mapping[str, Any]) -> None:
    """Print the board of `board.board_of`: the best in the first setting first, and what was not run below."""
    console = ScreenConsole(highlight=False)
    settings = board["settings"]
    console.print(f"{board['version']}: {board['about']}", markup=False)
    table = Table()
    table.add_column("method", overflow="fold")
    for setting in settings:
        table.add_column(
            "\n".join(["A_T", *(f"{_SHORT.get(key, key)} {value}" for key, value in setting.items())]), justify="right"
        )
    wide = console.width >= _NARROW
    for header in ("up (MiB)", "kept (MiB)", "rounds", "seconds") if wide else ():
        table.add_column(header, justify="right")
    if wide:
        table.add_column("gates", overflow="fold")
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in board["rows"]:
        rows.setdefault((row["method"], row["kind"]), []).append(row)
    there = [of for of in rows.values() if any(row["status"] == "run" for row in of) and not repeats(of[0])]
    for of in sorted(there, key=lambda of: -(of[0]["A_T"] or -1.0)):
        first = of[0]
        seconds = None if first["client_seconds"] is None else first["client_seconds"] + first["server_seconds"]
        spent = [_short(first["up_mib"]), _short(first["kept_mib"]), _short(first["rounds"]), _short(seconds)]
        spent.append(", ".join(first["gates"]))
        table.add_row(label_of(first), *map(_accuracy, of), *(spent if wide else []))
    console.print(table)
    costs = "Costs, of the first setting: the busiest client's uploads in all tasks, what one client stores at most,"
    costs += " the time of all clients and the server."
    apart = "Defaults compete with defaults, and tuned rows with tuned ones."
    gated = "* A run met a gate: it is no fair sample of its method. In brackets: only so many seeds."
    console.print(" ".join([LEGEND, apart, NO_PART, gated, *([costs] if wide else [])]), markup=False)
    absent: dict[str, list[str]] = {}
    for (method, kind), of in rows.items():
        if of not in there and (kind != TUNED or (method, DEFAULTS) not in rows):
            absent.setdefault(of[0]["why"], []).append(method)
    for why, methods in absent.items():
        console.print(f"not run: {', '.join(methods)}: {why}", markup=False)


def _accuracy(row: Mapping[str, Any]) -> Text:
    if row["A_T"] is None:
        return Text("not run", "dim")
    gate = "*" if row["gates"] else ""
    seeds = f" ({row['n']})" if row["why"] else ""
    return Text(f"{row['A_T']:.2f}{gate}{seeds}", "bold" if row["mark"] else "")


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.3g}" if number < 1000 else f"{number:,.0f}"
