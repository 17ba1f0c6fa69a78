"""Write one of the tables in results/ from run folders: the source of a page's numbers.

python -m benchmarks reference closed-form RUNS --page docs/results/closed_form.md --command "make closed-form"
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fcl_bench.config import text
from fcl_bench.results.collect import collect, selected
from fcl_bench.results.reference import folder
from fcl_bench.results.summarise import setting

#: The measures that tables keep; seconds are left out, since they come from another machine.
KEPT = ("A_avg", "A_T", "forgetting", "A_T_aware", "A_T_best", "up_max_mib", "up_total_max_mib", "times_raw")
_RUN = ("seed", "run_id", "git_commit")
_DIGITS = 10


def save(frame: pd.DataFrame, to: Path, about: dict[str, Any]) -> None:
    """Write `to`.csv and `to`.yaml.

    Args:
        frame: the result of `collect`.
        to: the path without suffix.
        about: further entries of the YAML file, beside what the runs share: `pages`, `commands`.
    """
    measures = [name for name in KEPT if frame[name].notna().any()]
    configured = [*setting(frame), "method", *(column for column in frame if column.startswith("method."))]
    texts = {column: frame[column].map(text) for column in configured}
    varying = [column for column in configured if texts[column].nunique() > 1]
    same = {column: texts[column].iloc[0] for column in configured if column not in varying}
    rows = frame.sort_values([*(column for column in ("method", "beta", "clients") if column in varying), "seed"])
    written = rows[[*varying, *_RUN, *measures]].assign(git_commit=rows["git_commit"].map(lambda c: text(c)[:12]))
    written = written.assign(**{column: texts[column] for column in varying})
    written.to_csv(to.with_suffix(".csv"), index=False, float_format=f"%.{_DIGITS}g")
    revisions = sorted(set(written["git_commit"]) - {""})
    content = {**about, "runs": len(rows), "revisions": revisions, "same": {k: v for k, v in same.items() if v}}
    to.with_suffix(".yaml").write_text(yaml.safe_dump(content, sort_keys=False, width=120))


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
