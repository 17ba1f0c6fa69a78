"""`wire`: the form in which messages travel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fcl_bench import config

#: `wire.dtype`: the types in which uploads may travel.
WIRE_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in config.WIRE_DTYPES}
#: Types whose range is so small that matrices travel with scales.
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class WireFormat:
    """How messages travel. All settings but `dtype` and `factors` are lossless in float64 and float32.

    Attributes:
        dtype: type of uploaded floating-point tensors. (Broadcasts travel in the types they have.)
        factors: how matrices of unit columns travel: "dtype" sends them in `dtype`; "int8" sends each column in units
            of its largest entry / 127, without that unit, because the receiver restores the length 1.
        gram: "full" sends symmetric matrices whole; "packed" sends their upper triangle, about half the bytes.
        columns: "task" sends per-class matrices with a column for every class of the task; "held" only the columns
            that are not zero (those of the classes that the client holds), and their numbers, 4 bytes each.
        projection: "seed" broadcasts the random projection as 8 bytes; "matrix" as d x M numbers in float64.
    """

    dtype: torch.dtype
    gram: str = "full"
    columns: str = "task"
    projection: str = "seed"
    factors: str = "dtype"

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def numbers_bytes(columns: int, wire: WireFormat) -> int:
    """Bytes on the wire of the numbers that come with a per-class matrix of so many columns: the width, and theirs."""
    return 4 * (1 + columns) if wire.columns == "held" else 0


def factor_bytes(rows: int, wire: WireFormat) -> int:
    """Bytes on the wire of one column of a matrix of unit vectors with `rows` rows."""
    return rows if wire.factors == "int8" else column_bytes(rows, wire.dtype)


def column_bytes(rows: int | None, dtype: torch.dtype) -> int:
    """Bytes on the wire of one column of a matrix with `rows` rows, or (None) of one entry of a vector.

    In a 16-bit type each column comes with a float32 scale, and a vector stays in float32 (see `engine.codec`).
    """
    half = dtype in HALF
    if rows is None:
        return 4 if half else dtype.itemsize
    return rows * dtype.itemsize + (4 if half else 0)
