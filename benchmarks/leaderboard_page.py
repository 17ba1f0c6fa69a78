"""Write the leaderboard's tables in README.md and the docs, and README's picture, from results/leaderboard.

python -m benchmarks.leaderboard_page

Below a line `<!-- TRACK: all -->` stands every method in all settings, below `<!-- TRACK: front -->` the Pareto front
in the first setting, and below `<!-- TRACK: stsa-afl ... -->` the differences of these pairs with their intervals. A
test compares them with what this writes.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from adjustText import adjust_text
from matplotlib.figure import Figure

from fcl_bench.leaderboard.board import board_of, label_of, repeats, results, rows_in
from fcl_bench.leaderboard.store import published, stored
from fcl_bench.leaderboard.track import DEFAULTS, TUNED
from fcl_bench.results.best import judged
from fcl_bench.results.figures.costs import pareto_front
from fcl_bench.results.figures.selection import CEILING_LOOKS, FRONT, drawn
from fcl_bench.results.summarise import YARDSTICK

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = (REPOSITORY / "README.md", REPOSITORY / "docs" / "results" / "leaderboard.md")
_PICTURE = REPOSITORY / "docs" / "images" / "leaderboard.png"
_MARKED = re.compile(r"(<!-- ([\w-]+): ([\w -]+) -->\n)(?:\|.*\n)*")
#: How many points of the picture are named, the most accurate first, beside those of the front.
_NAMED = 15


def main() -> None:
    for page in PAGES:
        page.write_text(written(page.read_text()))
    _PICTURE.write_bytes(drawn(_picture(_board("features")), "png"))


def written(text: str) -> str:
    """A page's text with its marked tables as the rows have them."""
    return _MARKED.sub(lambda found: found[1] + _table(found[2], found[3]), text)


@functools.cache
def _board(track: str) -> dict[str, Any]:
    return board_of(stored(track, published()))


def _table(track: str, which: str) -> str:
    makers = {"all": _all, "front": _front_table}
    head, *rows = makers[which](_board(track)) if which in makers else _differences(track, which.split())
    rule = ["---", *("---:" for _ in head[1:])]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *rows))


def _front_table(board: dict[str, Any]) -> list[list[str]]:
    """Methods of which no other sends as little and is more accurate, FedAvg, and the ceilings."""
    best, kinds = _best(board), _kinds(board)
    on_front = _on_front(best)
    chosen = list(on_front)
    chosen += [row for row in best if row["method"] == YARDSTICK and row not in on_front]
    chosen += sorted((row for row in best if row["ceiling"]), key=lambda row: row["A_T"])
    head = ["method", "upload per task (MiB)", "rounds per task", "A_T, defaults (%)", "A_T, tuned (%)"]
    tasks = len(chosen[0]["curve"])
    rows = [head]
    for row in chosen:
        upload = "all data" if row["ceiling"] else f"{row['up_mib'] / tasks:.3g}"
        rounds = "" if row["ceiling"] else f"{row['rounds'] / tasks:.3g}"
        accuracies = [_cell(kinds[row["method"], kind]) for kind in (DEFAULTS, TUNED)]
        rows.append([row["title"] + " (ceiling)" * row["ceiling"], upload, rounds, *accuracies])
    return rows


def _differences(track: str, pairs: Sequence[str]) -> list[list[str]]:
    """How much more accurate the first method of each pair is with its defaults, in every setting."""
    store = stored(track, published())
    rows = [["A_T, difference in points", *map(_named, store.about["settings"])]]
    for pair in pairs:
        first, _, second = pair.partition("-")
        titles = (store.about["methods"][method]["title"] for method in (first, second))
        cells = []
        for number in range(len(store.about["settings"])):
            there = {(row["method"], row["kind"]): row for row in rows_in(store, number)}
            both = [results(there[method, DEFAULTS]) for method in (first, second)]
            verdicts = judged(both, "A_T", True, store.answers.shares)
            # The better one of both has no interval.
            sign, found = next(entry for entry in zip((-1, 1), verdicts, strict=True) if not math.isnan(entry[1].low))
            low, high = sorted((sign * found.low, sign * found.high))
            cells.append(f"{sign * found.behind:+.2f} ({low:+.2f} to {high:+.2f})")
        rows.append([" minus ".join(titles), *cells])
    return rows


def _named(setting: Mapping[str, str]) -> str:
    return ", ".join(f"{'K' if key == 'clients' else key} {value}" for key, value in setting.items())


def _kinds(board: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of the first setting by method and kind."""
    return {(row["method"], row["kind"]): row for row in board["rows"] if row["setting"] == 0}


def _best(board: dict[str, Any]) -> list[dict[str, Any]]:
    """The better row of each method in the first setting, of those with all seeds."""
    best: dict[str, dict[str, Any]] = {}
    for (method, _), row in _kinds(board).items():
        if not row["why"] and row["A_T"] > best.get(method, {}).get("A_T", -1.0):
            best[method] = row
    return list(best.values())


def _on_front(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows on the Pareto front, by rising upload."""
    frame = pd.DataFrame([{**row, "gates": " ".join(row["gates"])} for row in rows])
    return [rows[place] for place in pareto_front(frame, "up_mib", "A_T").index]


def _picture(board: dict[str, Any]) -> Figure:
    """A_T against upload of every method's better row; the best and the front are named, the ceilings are lines."""
    best = _best(board)
    rivals = sorted((row for row in best if not row["ceiling"]), key=lambda row: -row["A_T"])
    front = _on_front(best)
    tasks = len(best[0]["curve"])
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    x, y = ([row["up_mib"] / tasks for row in front], [row["A_T"] for row in front])
    axes.plot(x, y, drawstyle="steps-post", **{**FRONT, "linewidth": 3})
    names: dict[tuple[float, float], list[str]] = {}
    for row in rivals:
        is_closed = row["family"] == "closed_form"
        where = row["up_mib"] / tasks, row["A_T"]
        axes.plot(*where, "o" if is_closed else "^", color="#0072B2" if is_closed else "#D55E00", alpha=0.8)
        if row in front or row["method"] == YARDSTICK or rivals.index(row) < _NAMED:
            # Methods that are almost at one place share a label.
            names.setdefault((round(math.log10(where[0]), 1), round(where[1])), []).append(row["title"])
    for row in (row for row in best if row["ceiling"]):
        axes.axhline(row["A_T"], **CEILING_LOOKS[row["method"]], label=f"{row['title']} (ceiling)")
    axes.plot([], [], "o", color="#0072B2", label="closed form: one or two rounds per task")
    axes.plot([], [], "^", color="#D55E00", label="trained: 20 rounds per task")
    axes.set_xlabel("upload of the busiest client per task (MiB)")
    axes.set_ylabel("accuracy after the last task, A_T (%)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8.5, loc="lower left")
    axes.margins(x=0.1, y=0.1)
    axes.xaxis.set_major_formatter("{x:g}")
    texts = [axes.text(10**x, y, ", ".join(titles), fontsize=8.5) for (x, y), titles in names.items()]
    points = {"x": [row["up_mib"] / tasks for row in rivals], "y": [row["A_T"] for row in rivals]}
    adjust_text(texts, **points, ax=axes, iter_lim=500, force_static=(0.4, 0.6))
    return figure


def _all(board: dict[str, Any]) -> list[list[str]]:
    named = map(_named, board["settings"])
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
