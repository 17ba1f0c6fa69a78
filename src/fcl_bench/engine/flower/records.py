"""Byte strings as the content of a Flower message: one array of plain bytes each, which Flower sends in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from flwr.app import Array, ArrayRecord, RecordDict

_BLOBS = "blobs"
#: How Flower is told to read the arrays: not at all.
_AS_IS = "fcl-bench"


def content(blobs: Sequence[bytes]) -> RecordDict:
    """Return the byte strings as a record."""
    arrays = {str(number): Array("uint8", (len(blob),), _AS_IS, blob) for number, blob in enumerate(blobs)}
    return RecordDict({_BLOBS: ArrayRecord(arrays)})


def blobs(records: RecordDict) -> list[bytes]:
    """Return what `content` was given."""
    arrays = records.array_records[_BLOBS]
    return [arrays[str(number)].data for number in range(len(arrays))]
