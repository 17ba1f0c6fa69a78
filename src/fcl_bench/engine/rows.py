"""Tables of numbers that only grow, as checkpoints write them."""

from __future__ import annotations

import numpy as np
import torch


class Rows:
    """A table of numbers that grows at the end, with room to spare, so that adding a row costs the same at any length.

    Args:
        dtype: NumPy's type of a row; its fields are the columns.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self._room = np.zeros(0, dtype=dtype)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    @property
    def array(self) -> np.ndarray:
        """(n,) the rows so far; a view, valid until the next `extend`."""
        return self._room[: self._used]

    def extend(self, rows: np.ndarray) -> None:
        """Add `rows` (m,) of the table's type."""
        needed = self._used + len(rows)
        if needed > len(self._room):
            # It grows by half, so that n rows are moved at most twice each on average, and at most a third is spare.
            room = np.zeros(max(needed, len(self._room) * 3 // 2), dtype=self._room.dtype)
            room[: self._used] = self.array
            self._room = room
        self._room[self._used : needed] = rows
        self._used = needed

    def tensor(self) -> torch.Tensor:
        """(n, bytes of a row) uint8: the rows as they lie in memory, without a copy."""
        return torch.from_numpy(self.array.view(np.uint8).reshape(self._used, self._room.dtype.itemsize))

    def restore(self, saved: torch.Tensor) -> None:
        """Take over what `tensor` returned."""
        rows = np.ascontiguousarray(saved.cpu().numpy()).view(self._room.dtype)
        self._room, self._used = rows.reshape(len(saved)).copy(), len(saved)
