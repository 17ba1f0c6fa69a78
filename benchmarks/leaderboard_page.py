"""Write the tables of docs/results/leaderboard.md from the rows in results/leaderboard.

python -m benchmarks.leaderboard_page

A table of every method in all settings stands below a line `<!-- TRACK: all -->`; a test compares it with what this
writes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fcl_bench.leaderboard.board import board_of, label_of, repeats
from fcl_bench.leaderboard.store import published, stored

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "results" / "leaderboard.md"
_MARKED = re.compile(r"(<!-- ([\w-]+): all -->\n)(?:\|.*\n)*")


def main() -> None:
    PAGE.write_text(written(PAGE.read_text()))


def written(text: str) -> str:
    """A page's text with its marked tables as the rows have them."""
    return _MARKED.sub(lambda found: found[1] + _table(found[2]), text)


def _table(track: str) -> str:
    board = board_of(stored(track, published()))
    head, *rows = _all(board)
    rule = ["---", *("---:" for _ in head[1:])]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *rows))


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


if __name__ == "__main__":
    main()
