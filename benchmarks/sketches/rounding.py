"""Numbers rounded as on the wire, and the bytes that they take there."""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor


def rounded(V: Tensor, bits: int, fine: int = 0) -> Tensor:
    """Columns of V as integers of `bits` bits times max |v|, renormalised; the first `fine` in 8 bits; 32: as it is."""
    if bits >= 32 or not V.shape[1]:
        return V
    levels = torch.full((V.shape[1],), 2.0 ** (bits - 1) - 1, dtype=V.dtype)
    levels[:fine] = 127
    scale = V.abs().amax(0) / levels
    V = (V / scale).round() * scale
    return V / torch.linalg.vector_norm(V, dim=0)


def rounded_sums(S: Tensor, bits: int) -> Tensor:
    """Columns of S in 16-bit floating point or as integers of fewer bits, each with a scale; 32: as they are."""
    if bits >= 32:
        return S
    largest = S.abs().amax(0)
    scale = torch.where(largest > 0, largest, 1.0)
    if bits == 16:
        return (S / scale).half().to(S) * scale
    levels = 2.0 ** (bits - 1) - 1
    return (S / scale * levels).round() * scale / levels


def factor_bytes(rows: int, columns: int, bits: int, fine: int = 0) -> int:
    """Return the bytes of unit columns, each with a scale and a singular value in float32."""
    whole = rows * (8 * min(fine, columns) + bits * (columns - min(fine, columns)))
    return math.ceil(whole / 8) + (4 if bits >= 32 else 8) * columns


def sums_bytes(rows: int, columns: int, bits: int) -> int:
    return math.ceil(rows * columns * bits / 8) + (0 if bits >= 32 else 4 * columns)
