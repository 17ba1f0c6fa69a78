"""What a reader has to know of a paper's table: its errata, what the copy has lost, how ours is compared."""

from __future__ import annotations

import pandas as pd

from fcl_bench.papers.nominal import SIZES

_LOST = "The copy of the paper has lost this table; what the text says of it is here."
#: By paper and table; None: of all tables of the paper.
_NOTES: dict[tuple[str, str | None], str] = {
    ("fedran", "Table 3"): _LOST,
    ("fedran", "Table 4"): (
        "Erratum 5 (docs/errata.md): the paper counts float64, all classes of the data in every task and the nominal "
        "rank. Its megabytes (MiB) are not in the copy of the paper; they are as the project's specification lists "
        "them. The paper's STSA is STSA-E. TARGET: a ResNet-18's float32 state, 100 rounds; on CIFAR-100 with the "
        "3 x 3 stem."
    ),
    ("fedran", "Table 5"): _LOST,
    ("fedran", "Table 6"): f"{_LOST} Erratum 5 (docs/errata.md): its megabytes are counted as in Table 4.",
    ("stsa", None): (
        "Errata 1 and 7 (docs/errata.md): STSA-E's estimator is biased as printed, and method.estimator=paper is what "
        "is compared; Eq. 60 forgets its 1/T, the tables do not."
    ),
    ("afl", None): "Erratum 3 (docs/errata.md): wrong signs in Eq. 6, 8 and 10, on which the tables do not depend.",
    ("fedprotip", "Table 8"): "Erratum 8 (docs/errata.md): FT at threshold 0.7 differs from Table 11.",
    ("fedprotip", "Table 9"): (
        "Erratum 8 (docs/errata.md): FOT's activations are counted by another rule than in Table 20, and the model "
        "grows by more than its classes need."
    ),
    ("fedprotip", "Table 11"): (
        "Erratum 8 (docs/errata.md): the forgetting of the columns +TIP and task-agnostic, and DomainNet's accuracies, "
        "are interchanged against Tables 1, 8 and 16; FT at threshold 0.7 differs from Table 8. Kept as printed."
    ),
    ("fedprotip", None): (
        "The paper's test batches are of one task each (method.tip.route=batch); our numbers under that protocol have "
        "columns of their own."
    ),
}
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
    """Paragraphs below the table."""
    own = [_NOTES[key] for key in ((paper, table), (paper, None)) if key in _NOTES]
    counts = cells["metric"].isin(SIZES).any()
    return [*own, _LEGEND, *([_COUNTED] if counts else [])]
