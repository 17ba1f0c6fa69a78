"""Test batches in the form in which the server scores them, kept from task to task."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Bytes that may be kept: what the evaluation of a run takes whatever the size of its data.
BUDGET = 2**28


class KeptBatches:
    """The test samples of earlier tasks are scored again after every task, and what comes first is always the same.

    Args:
        size: samples in a full batch. Only such are kept, since the last, partial one grows with the next task.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._room = BUDGET
        self._kept: dict[int, torch.Tensor] = {}

    def get(self, number: int, make: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        """Batch `number`, from `make` where it is not kept; None where `make` has none."""
        if number in self._kept:
            return self._kept[number]
        batch = make()
        if batch is not None and len(batch) == self._size and batch.nbytes <= self._room:
            self._kept[number] = batch
            self._room -= batch.nbytes
        return batch
