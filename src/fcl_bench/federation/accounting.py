"""The uploads of a method under the papers' own conventions, so that their tables can be checked to the printed digit.

The ledger counts what is really sent; these functions count what a paper's table counts.
"""

from collections.abc import Sequence

MIB = 2**20


def fedran_mib(M: int, rank: int, classes: int) -> float:
    """FedRAN's upload in FedRAN's Table 4 (MiB): 8 (M r + r + M C), float64, all C classes, nominal rank (Eq. 11)."""
    return 8 * (M * rank + rank + M * classes) / MIB


def fedran_under_stsa_mib(M: int, ranks: Sequence[int], classes_per_task: Sequence[int]) -> float:
    """FedRAN's upload as STSA's Table 5 counts (MiB): float32, per-task classes, summed over the tasks."""
    return sum(4 * (M * r + r + M * c) for r, c in zip(ranks, classes_per_task, strict=True)) / MIB
