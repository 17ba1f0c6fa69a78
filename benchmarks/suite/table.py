"""A result file as a Markdown table, with the machine above it and the lines below it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from suite.lines import Checked, check
from suite.results import Case, Results, Timed, rate_ratio, ratio
from suite.sides import LIMIT, PEER

HEAD = ("stage", "case", "ours", "limit", "ours / limit", "rate", "peer", "peer / ours")
#: Behind seconds of which only a share was measured.
MARK = "\\*"


def machine_line(results: Results) -> str:
    """What the seconds depend on, in one line."""
    machine = results.machine
    ours: Mapping[str, Any] = machine.get("fcl_bench", {})
    cpu = (machine.get("cpu") or {}).get("brand_raw", "unknown CPU")
    told = [
        str(ours.get("device", "cpu")),
        f"CPU {cpu}",
        f"{ours.get('cores', '?')} cores",
        f"{ours.get('threads', '?')} threads",
        f"{ours.get('memory_gib', '?')} GiB",
        f"torch {ours.get('torch', '?')}",
        f"BLAS {ours.get('blas', '?')}",
        f"Python {ours.get('python', '?')}",
        f"commit {_short(ours.get('git_commit') or results.commit)}",
        f"load {ours.get('load_average', float('nan')):.1f}",
        _rounds(results),
    ]
    return ", ".join(told)


def _rounds(results: Results) -> str:
    """How many measurements stand behind a number."""
    counts = sorted({len(case.ours.seconds) for case in results.cases.values()})
    return "one measurement each" if counts == [1] else f"medians of {' or '.join(map(str, counts))} rounds"


def _short(commit: str) -> str:
    """Twelve digits of a hash, and whether there were changes beside it."""
    digits, dash, dirty = commit.partition("-")
    return digits[:12] + dash + dirty


def markdown(results: Results) -> str:
    """The machine, a row for each case (and for each further limit or peer), and the lines."""
    parts = [machine_line(results), "", _row(HEAD), _row(["---"] * len(HEAD))]
    parts += [_row(row) for case in results.cases.values() for row in _rows(case)]
    if any(side.share < 1 for case in results.cases.values() for side in case.sides):
        parts += ["", f"{MARK} a share of the work, scaled to the whole"]
    checked = check(results)
    known = [one for one in checked if one.measured is not None]
    if known:
        parts += ["", _row(("line", "bound", "measured", "holds")), _row(["---"] * 4)]
        parts += [_row(_line_cells(one)) for one in known]
        parts += ["", f"{sum(bool(one.holds) for one in known)} of {len(known)} lines hold; {_absent(checked)}"]
    return "\n".join(parts) + "\n"


def _absent(checked: list[Checked]) -> str:
    absent = [one.line.case for one in checked if one.measured is None]
    return f"not measured: {'; '.join(dict.fromkeys(absent))}" if absent else "all were measured"


def _rows(case: Case) -> Iterator[list[str]]:
    sizes = case.name.removeprefix(f"{case.stage}: ")
    limits, peers = case.beside(LIMIT), case.beside(PEER)
    for index in range(max(1, len(limits), len(peers))):
        row = [case.stage, sizes, seconds(case.ours.median)] if index == 0 else ["", "", ""]
        under = limits[index] if index < len(limits) else None
        over = peers[index] if index < len(peers) else None
        rate = None if under is None else rate_ratio(case.ours, under)
        row += [
            "" if under is None else _told(under),
            "" if under is None else f"{ratio(case.ours, under):.2f}",
            "" if rate is None else f"{100 * rate:.0f} %",
            "" if over is None else _told(over),
            "" if over is None else f"{ratio(over, case.ours):.1f}",
        ]
        yield row
    for name, value in case.values.items():
        yield ["", "", f"{value:.3g} {name}", "", "", "", "", ""]


def _told(side: Timed) -> str:
    return f"{seconds(side.median)}{MARK if side.share < 1 else ''} ({side.what})"


def _line_cells(checked: Checked) -> list[str]:
    assert checked.measured is not None
    measured = f"{100 * checked.measured:.0f} %" if checked.line.kind == "rate" else f"{checked.measured:.3g}"
    return [checked.line.case, str(checked.line), measured, "yes" if checked.holds else "**no**"]


def seconds(value: float) -> str:
    """Three digits, in the unit that suits."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"
