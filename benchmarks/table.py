"""The table of a result file that the suite wrote, made anew.

    .venv/bin/python benchmarks/table.py outputs/bench/full.json

Exit code 2 if the file is no result of the suite.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from suite import results, table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON")
    try:
        found = results.load(parser.parse_args(arguments).result)
    except results.Unusable as error:
        print(f"table: error: {error}", file=sys.stderr)
        return 2
    print(table.markdown(found), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
