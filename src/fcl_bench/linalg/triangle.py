"""Symmetric and triangular matrices as the entries of one triangle."""

from __future__ import annotations

import math

import torch


def upper_half(size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """(size, size) bool: which entries of a matrix are on or above the diagonal."""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu()


def packed(matrix: torch.Tensor) -> torch.Tensor:
    """(d (d + 1) / 2,) the entries of `matrix` (d, d) on and above its diagonal, by rows."""
    return matrix[upper_half(len(matrix), matrix.device)]


def triangular(entries: torch.Tensor) -> torch.Tensor:
    """(d, d) the upper triangular matrix whose `packed` entries these are."""
    size = math.isqrt(2 * len(entries))
    matrix = entries.new_zeros(size, size)
    matrix[upper_half(size, entries.device)] = entries
    return matrix


def symmetric(entries: torch.Tensor) -> torch.Tensor:
    """(d, d) the symmetric matrix whose `packed` entries these are."""
    matrix = triangular(entries)
    matrix += matrix.triu(1).T
    return matrix
