"""The table of a result file, of any benchmark, made anew.

    python -m benchmarks table outputs/bench/full.json

Exit code 2 if the file is no result.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import report
from suite import results, table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON")
    file = parser.parse_args(arguments).result
    try:
        found = report.table_of(report.load(file)["rows"])
    except (OSError, ValueError):
        found = ""  # the suite's own form, or no result
    try:
        found = found or table.markdown(results.load(file))
    except results.Unusable as error:
        print(f"table: error: {error}", file=sys.stderr)
        return 2
    print(found.rstrip("\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
