"""A track's table on the terminal: a row per method, its accuracy in every setting, and what it costs in the first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from fcl_bench.execution.screen import ScreenConsole
from fcl_bench.leaderboard.board import label_of, repeats
from fcl_bench.leaderboard.track import DEFAULTS, TUNED
from fcl_bench.results.best import LEGEND
from fcl_bench.results.summarise import NO_PART

#: Names of keys in headers.
_SHORT = {"clients": "K"}
_WIDEST = 200
#: Below this width of a terminal the costs and the gates are in the page alone.
_NARROW = 100


def print_board(board: Mapping[str, Any]) -> None:
    """Print the board of `board.board_of`: the best in the first setting first, and what was not run below."""
    console = ScreenConsole(highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = _WIDEST  # a pipe has no width unless the user sets one
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
