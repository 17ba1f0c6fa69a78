"""Write one of the tables in results/ from run folders: the source of a page's numbers.

python benchmarks/reference.py closed-form RUNS --page docs/results/closed_form.md --command "make closed-form"
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from fcl_bench.results.collect import collect, selected
from fcl_bench.results.reference import folder, save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("runs", type=Path, nargs="+", help="folders of run folders")
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUE", help="as of fcl-tables")
    parser.add_argument("--page", action="append", default=[], help="where the numbers stand")
    parser.add_argument("--command", action="append", default=[], help="that makes the runs")
    asked = parser.parse_args()
    frame = pd.concat([collect(runs) for runs in asked.runs], ignore_index=True).drop_duplicates("run_id")
    save(selected(frame, asked.where), folder() / asked.name, {"pages": asked.page, "commands": asked.command})


if __name__ == "__main__":
    main()
