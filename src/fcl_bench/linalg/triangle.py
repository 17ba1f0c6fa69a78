"""Store symmetric and triangular matrices as the entries of one triangle."""

from __future__ import annotations

import math

import numpy as np
import torch

#: Rows and columns of a matrix mirrored at a time.
_TALL, _WIDE = 64, 512


def packed(matrix: torch.Tensor) -> torch.Tensor:
    """(d (d + 1) / 2,) the entries of `matrix` (d, d) on and above its diagonal, by rows."""
    if matrix.device.type != "cpu":
        return matrix[_upper_half(matrix)]
    size = len(matrix)
    entries = matrix.new_empty(size * (size + 1) // 2)
    rows, into, at = _numbers(matrix), _numbers(entries), 0
    # Row by row: a mask of all entries takes five times as long.
    for row in range(size):
        into[at : at + size - row] = rows[row, row:]
        at += size - row
    return entries


def triangular(entries: torch.Tensor) -> torch.Tensor:
    """(d, d) the upper triangular matrix whose `packed` entries these are. Raises `ValueError` if there is none."""
    size = math.isqrt(2 * len(entries))
    if len(entries) != size * (size + 1) // 2:
        raise ValueError(f"{len(entries)} entries are no triangle")
    matrix = entries.new_zeros(size, size)
    if matrix.device.type != "cpu":
        matrix[_upper_half(matrix)] = entries
        return matrix
    rows, taken, at = _numbers(matrix), _numbers(entries), 0
    for row in range(size):
        rows[row, row:] = taken[at : at + size - row]
        at += size - row
    return matrix


def symmetric(entries: torch.Tensor) -> torch.Tensor:
    """(d, d) the symmetric matrix whose `packed` entries these are."""
    return mirror(triangular(entries))


def mirror(G: torch.Tensor) -> torch.Tensor:
    """Make a matrix symmetric whose upper triangle is right, in place and by blocks."""
    # Columns are read from a copy whose row stride is not a power of two; with such strides a cache holds few rows.
    copied = G.new_empty(_TALL, _WIDE + 8)
    for begin in range(0, len(G), _TALL):
        end = begin + _TALL
        corner = G[begin:end, begin:end]
        corner.copy_(corner.triu() + corner.triu(1).T)
        for left in range(end, len(G), _WIDE):
            block = G[begin:end, left : left + _WIDE]
            G[left : left + _WIDE, begin:end] = copied[: block.shape[0], : block.shape[1]].copy_(block).T
    return G


def _upper_half(matrix: torch.Tensor) -> torch.Tensor:
    """(d, d) bool: which entries of `matrix` (d, d) are on or above the diagonal."""
    return torch.ones_like(matrix, dtype=torch.bool).triu()


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    """A NumPy view of the tensor's memory; NumPy has no bfloat16, so its two bytes are copied as integers."""
    tensor = tensor.detach()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
