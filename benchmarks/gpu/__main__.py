"""`python -m benchmarks.gpu check|papers`: see docs/how-to/gpu.md."""

from __future__ import annotations

import sys

from benchmarks.gpu import check, papers

WAYS = {"check": check.main, "papers": papers.main}


def main() -> int:
    """The exit code of the part that the first word names; 2 for another word."""
    way, *rest = sys.argv[1:] or [""]
    if way not in WAYS:
        print(f"python -m benchmarks.gpu: error: {way!r} is no part; try {' or '.join(WAYS)}", file=sys.stderr)
        return 2
    return WAYS[way](rest)


if __name__ == "__main__":
    sys.exit(main())
