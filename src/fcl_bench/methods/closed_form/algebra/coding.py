"""Factors as integers of a common step, in as few bytes as their distribution allows."""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch

#: Of zlib: raw deflate without header or checksum, and the most memory, so the longest blocks.
_WINDOW, _MEMORY = -15, 9


def coded(F: torch.Tensor, fineness: float) -> tuple[torch.Tensor, float]:
    """The bytes (b,) of the integers nearest to F / step, for F (M, r) with columns in any order, and the step.

    One step for all columns gives each as many bits as it counts in F F'. The integers, -127 to 127, go column by
    column through the Huffman coding of deflate, since they have few values, and 0 is the most frequent.

    Args:
        fineness: the step over the root-mean-square entry of a column of mean length, where longer columns count more;
            larger where 127 steps would not reach the largest entry.
    """
    lengths = torch.linalg.vector_norm(F, dim=0)
    # Columns of no length, which are rounding, do not change this mean.
    mean = (lengths.square().sum() / lengths.sum()).nan_to_num(0.0)
    largest = F.abs().max() if F.numel() else F.new_zeros(())
    step = float(torch.maximum(fineness * mean / math.sqrt(len(F)), largest / 127)) or 1.0
    integers = (F / step).round().to(torch.int8).T.contiguous().cpu().numpy()
    deflate = zlib.compressobj(9, zlib.DEFLATED, _WINDOW, _MEMORY, zlib.Z_HUFFMAN_ONLY)
    sent = deflate.compress(integers.tobytes()) + deflate.flush()
    return torch.from_numpy(np.frombuffer(sent, np.uint8).copy()).to(F.device), step


def decoded(codes: torch.Tensor, step: float, rows: int, most: int) -> torch.Tensor | None:
    """F (rows, r) in float64 of the bytes that `coded` made, r at most `most`; None if they are of no such matrix.

    No more memory is used than such a matrix needs, whatever the bytes are.
    """
    inflate = zlib.decompressobj(_WINDOW)
    try:
        integers = inflate.decompress(codes.cpu().numpy().tobytes(), rows * most + 1)
    except zlib.error:
        return None
    if not inflate.eof or inflate.unused_data or len(integers) > rows * most or len(integers) % rows:
        return None
    found = torch.from_numpy(np.frombuffer(integers, np.int8).copy()).to(torch.float64)
    return found.to(codes.device).reshape(-1, rows).T * step
