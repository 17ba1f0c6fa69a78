"""Compare two result files of the suite case by case, to find stages that have become slower.

    python -m benchmarks compare outputs/bench/before.json outputs/bench/after.json --tolerance 0.3

The ratio of our time to the limit's is compared, not the time itself. Both are measured in turn in one run, so another
machine or a busy one changes the ratio little. Exit code 1 if a case's ratio has grown by more than the tolerance, or a
case of OLD is missing in NEW; 2 if a file is no result of the suite or the two have no case in common.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from suite.results import Results, Unusable, load, ratio
from suite.sides import LIMIT
from suite.table import machine_line

#: What is wrong, from worst to best.
SLOWER, MISSING, SAME, FASTER, NEW = "slower", "missing", "same", "faster", "new"


@dataclass(frozen=True)
class Compared:
    """One case compared with one limit.

    Attributes:
        case, beside: their names.
        old, new: ours over the limit; None where a file does not have it.
        verdict: one of the verdicts above.
    """

    case: str
    beside: str
    old: float | None
    new: float | None
    verdict: str

    @property
    def change(self) -> float | None:
        """new over old."""
        return None if self.old is None or self.new is None else self.new / self.old


def compare(old: Results, new: Results, tolerance: float) -> list[Compared]:
    """Compare every case and limit of either file, OLD's first.

    Raises:
        Unusable: they have none in common.
    """
    before, after = ratios(old), ratios(new)
    if not before.keys() & after.keys():
        raise Unusable("the two files have no case in common")
    rows = []
    for key in before | after:
        was, now = before.get(key), after.get(key)
        if now is None:
            verdict = MISSING
        elif was is None:
            verdict = NEW
        elif now > was * (1 + tolerance):
            verdict = SLOWER
        else:
            verdict = FASTER if was > now * (1 + tolerance) else SAME
        rows.append(Compared(*key, was, now, verdict))
    return rows


def ratios(results: Results) -> dict[tuple[str, str], float]:
    """Ours over the limit by case and limit."""
    cases = results.cases.values()
    return {(case.name, side.what): ratio(case.ours, side) for case in cases for side in case.beside(LIMIT)}


def markdown(rows: list[Compared]) -> str:
    lines = [("case", "limit", "old", "new", "new / old", ""), ("---",) * 6]
    for row in rows:
        numbers = ["" if value is None else f"{value:.2f}" for value in (row.old, row.new, row.change)]
        verdict = f"**{row.verdict}**" if row.verdict in (SLOWER, MISSING) else row.verdict
        lines.append((row.case, row.beside, *numbers, verdict))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD", help="JSON")
    parser.add_argument("new", type=Path, metavar="NEW", help="JSON")
    parser.add_argument("--tolerance", type=float, default=0.5, help="growth of a ratio that is noise (default: 0.5)")
    options = parser.parse_args(arguments)
    if options.tolerance < 0:
        parser.error(f"--tolerance {options.tolerance} is below zero")
    try:
        old, new = load(options.old), load(options.new)
        rows = compare(old, new, options.tolerance)
    except Unusable as error:
        print(f"compare: error: {error}", file=sys.stderr)
        return 2
    for name, file in (("old", old), ("new", new)):
        print(f"{name}: {machine_line(file)}")
    print(f"\n{markdown(rows)}", end="")
    bad = [row for row in rows if row.verdict in (SLOWER, MISSING)]
    print(f"\n{len(rows)} ratios; {len(bad)} slower by more than {100 * options.tolerance:g} % or missing")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
