"""Test batches in the form in which the server scores them, kept from task to task."""

from __future__ import annotations

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

    def get(self, number: int) -> torch.Tensor | None:
        """Batch `number`, if it is kept."""
        return self._kept.get(number)

    def offer(self, number: int, batch: torch.Tensor) -> None:
        """Keep `batch` under `number`, if it is full and there is room."""
        if len(batch) == self._size and batch.nbytes <= self._room:
            self._kept[number] = batch
            self._room -= batch.nbytes
