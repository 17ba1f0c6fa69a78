"""What a reader has to know of a paper's table: its errata, what the copy has lost, how ours is compared."""

from __future__ import annotations

import pandas as pd
import yaml

from fcl_bench.papers.nominal import SIZES
from fcl_bench.papers.printed import paper_files

_LEGEND = (
    "Printed: as printed. Ours: mean ± standard deviation over seeds (number of seeds) of complete runs in exactly the "
    "printed setting, every key that it does not name at its default; the difference is ours less printed. In each "
    "column and setting the best is bold and the second underlined, ceilings aside. The command for each number is in "
    "the CSV."
)
_COUNTED = (
    "Counted here: from the method's own accounting under the paper's convention, without a run; MB of these tables "
    "are MiB. A task as sent: one task's upload at the nominal rank, in float32 and with the task's classes, the same "
    "accounting for all methods. Measured: what the busiest client of our runs sent, in MiB, in its busiest task and "
    "in all tasks; less than nominal wherever a client holds fewer samples than the rank."
)


def notes(paper: str, table: str, cells: pd.DataFrame) -> list[str]:
    """Paragraphs below a table: those of the paper's notes.yaml, then what is said of any.

    Args:
        paper, table: as in `printed()`.
        cells: the table's rows there.
    """
    file = paper_files("notes.yaml").get(paper)
    own = {} if file is None else yaml.safe_load(file.read_text(encoding="utf-8"))
    counted = [_COUNTED] if cells["metric"].isin(SIZES).any() else []
    return [*(own[key] for key in (table, "all tables") if key in own), _LEGEND, *counted]
