"""Uploads under the papers' own conventions, so that their tables can be checked to the printed digit.

The ledger counts what is really sent; these functions count what a paper's table counts. Each `*_values` is the number
of values in one upload with label columns for `classes` classes; a convention then says which classes, how many bytes a
value, and whether tasks add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

MIB = 2**20


def fedran_values(M: int, rank: int, classes: int) -> int:
    """FedRAN's V, sigma and B at the nominal rank (Eq. 11)."""
    return M * rank + rank + M * classes


def stsa_values(M: int, classes: int) -> int:
    """STSA's G and C; AFL's and AFCL's C_k and W_k too, with M the width of the features."""
    return M * M + M * classes


def stsa_e_values(M: int, classes: int, dummy_clients: int) -> int:
    """STSA-E's class sums and counts of every dummy client."""
    return (M + 1) * classes * dummy_clients


def centred_sketch_values(M: int, rank: int, classes: int, centre: bool) -> int:
    """The centred sketch's V, sigma, class sums, counts (only where it centres) and noise."""
    return M * (rank + classes) + rank + 1 + (classes if centre else 0)


def accountings(
    values: Callable[[int], int], classes_per_task: Sequence[int], fedran: Callable[[int], int] | None = None
) -> dict[str, float]:
    """Both conventions for uploads of `values(classes)` values.

    `fedran_mib` (FedRAN's Table 4): one task's upload in float64 with label columns for all classes of the stream.
    `stsa_mib` (STSA's Table 5): the uploads of all tasks in float32, each with the task's own classes.

    Args:
        values: classes -> values in one upload.
        classes_per_task: c_t.
        fedran: the same for FedRAN's convention, where it counts otherwise.
    """
    return {
        "fedran_mib": 8 * (fedran or values)(sum(classes_per_task)) / MIB,
        "stsa_mib": sum(4 * values(classes) for classes in classes_per_task) / MIB,
    }


def rounds_mib(state: Iterable[torch.Tensor], rounds: int) -> float:
    """What a gradient method uploads for a task (MiB): the whole model state, buffers included, in every round."""
    return rounds * sum(tensor.numel() * tensor.element_size() for tensor in state) / MIB
