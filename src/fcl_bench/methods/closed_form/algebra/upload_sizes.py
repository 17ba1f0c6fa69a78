"""Sizes of the closed-form methods' uploads as the tables of FedRAN's and STSA's papers count them.

The ledger counts what is really sent. Each `*_values` is the number of values in one upload with label columns for
`classes` classes; a convention says which classes count, how many bytes a value has, and whether tasks are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fcl_bench.protocol.context import Context

_MIB = 2**20


def both_conventions(
    values: Callable[[int], int], context: Context, classes_per_task: Sequence[int], in_fedran: int | None = None
) -> dict[str, float]:
    """`Method.paper_bytes` of uploads of `values(classes)` values; FedRAN's table may count `in_fedran` values."""
    return {
        "fedran_mib": 8 * (in_fedran or values(context.all_classes(classes_per_task))) / _MIB,
        "stsa_mib": sum(4 * values(classes) for classes in classes_per_task) / _MIB,
    }


def fedran_values(M: int, rank: int, classes: int) -> int:
    """The count of FedRAN's V, sigma and B at the nominal rank (Eq. 11)."""
    return M * rank + rank + M * classes


def stsa_values(M: int, classes: int) -> int:
    """The count of STSA's G and C; of AFL's and AFCL's C_k and W_k too, with M the width of the features."""
    return M * M + M * classes


def stsa_e_values(M: int, classes: int, dummy_clients: int) -> int:
    """The count of STSA-E's class sums and counts of every dummy client."""
    return (M + 1) * classes * dummy_clients


def centred_sketch_values(M: int, rank: int, classes: int, centre: bool) -> int:
    """The count of the sketch's V, sigma, class sums, counts (only if it centres) and noise."""
    return M * (rank + classes) + rank + 1 + (classes if centre else 0)
