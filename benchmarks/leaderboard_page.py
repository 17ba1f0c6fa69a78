"""Write the tables of docs/results/leaderboard.md from the rows in results/leaderboard.

python -m benchmarks.leaderboard_page

A table stands below a line `<!-- TRACK: front -->` (what no row beats with fewer bytes, in the first setting) or
`<!-- TRACK: all -->` (every method, in all settings). A test compares them with what this writes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fcl_bench.leaderboard.board import board_of, label_of, repeats
from fcl_bench.leaderboard.store import published, stored

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "results" / "leaderboard.md"
_MARKED = re.compile(r"(<!-- ([\w-]+): (front|all) -->\n)(?:\|.*\n)*")


def main() -> None:
    PAGE.write_text(written(PAGE.read_text()))


def written(text: str) -> str:
    """A page's text with its marked tables as the rows have them."""
    return _MARKED.sub(lambda found: found[1] + _table(found[2], found[3]), text)


def _table(track: str, kind: str) -> str:
    board = board_of(stored(track, published()))
    lines = _front(board) if kind == "front" else _all(board)
    head, *rows = lines
    rule = ["---", *("---:" for _ in head[1:])]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *rows))


def front(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that no other beats with as few bytes, the fewest bytes first; ceilings have no place."""
    found: list[dict[str, Any]] = []
    able = [row for row in rows if not (row["ceiling"] or row["why"] or row["gates"] or repeats(row))]
    for row in sorted(able, key=lambda row: (row["up_mib"], -row["A_T"])):
        if not found or row["A_T"] > found[-1]["A_T"]:
            found.append(row)
    return found


def _front(board: dict[str, Any]) -> list[list[str]]:
    rows = [row for row in board["rows"] if row["setting"] == 0]
    ceilings = sorted((row for row in rows if row["ceiling"] and not row["why"]), key=lambda row: -row["A_T"])[:1]
    head = ["method", "upload of the busiest client, MiB in all", "A_avg, mean over tasks (%)", "A_T, last task (%)"]
    return [
        head,
        *(
            [label_of(row), f"{row['up_mib']:.3g}", _mean(row, "A_avg"), _mean(row, "A_T")]
            for row in [*front(rows), *ceilings]
        ),
    ]


def _all(board: dict[str, Any]) -> list[list[str]]:
    named = [
        ", ".join(f"{'K' if key == 'clients' else key} {value}" for key, value in one.items())
        for one in board["settings"]
    ]
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in (row for row in board["rows"] if not repeats(row)):
        rows.setdefault(label_of(row), []).append(row)
    there = [(label, of) for label, of in rows.items() if any(row["A_T"] is not None for row in of)]
    there.sort(key=lambda entry: -(entry[1][0]["A_T"] or 0.0))
    head = ["method", "upload (MiB)", *named]
    return [head, *([label, f"{of[0]['up_mib']:.3g}", *map(_cell, of)] for label, of in there)]


def _cell(row: dict[str, Any]) -> str:
    if row["A_T"] is None:
        return "not run"
    text = f"{row['A_T']:.2f}" + "*" * bool(row["gates"]) + (f" ({row['n']})" if row["why"] else "")
    return f"**{text}**" if row["mark"] else text


def _mean(row: dict[str, Any], measure: str) -> str:
    return f"{row[measure]:.2f} ± {row[f'{measure}_std']:.2f}"


if __name__ == "__main__":
    main()
