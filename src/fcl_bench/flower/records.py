"""Byte strings as the content of a Flower message: one array of plain bytes, which Flower sends in pieces.

Flower sends every array as two objects, each with a request of its own, and a reader who comes before the last object
waits for a second or more. So the strings of one message share an array, which begins with a hash of the rest, and with
their number and lengths. The hash is for damage on the way, which only TLS or a signature prevents where it is wilful.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from flwr.app import Array, ArrayRecord, RecordDict

_BLOBS = "blobs"
#: How Flower is told to read the array: not at all.
_AS_IS = "fcl-bench"
#: A number or a length.
_LENGTH = struct.Struct("<q")
_HASH = 16


class TooLong(ValueError):
    """An answer has more bytes than the server expects."""


def content(blobs: Sequence[bytes]) -> RecordDict:
    """The byte strings as a record."""
    lengths = [_LENGTH.pack(length) for length in (len(blobs), *map(len, blobs))]
    joined = b"".join([*lengths, *blobs])
    joined = blake2b(joined, digest_size=_HASH).digest() + joined
    return RecordDict({_BLOBS: ArrayRecord({_BLOBS: Array("uint8", (len(joined),), _AS_IS, joined)})})


def blobs(records: RecordDict, most: int | None = None) -> list[bytes]:
    """What `content` was given.

    Args:
        most: bytes that it may have; None: any number.

    Raises:
        TooLong: the record is larger.
        ValueError: it is not one that `content` returns.
    """
    try:
        joined = records.array_records[_BLOBS][_BLOBS].data
        if most is not None and len(joined) > most:
            raise TooLong(f"the answer has {len(joined)} bytes, where at most {most} are expected")
        if blake2b(memoryview(joined)[_HASH:], digest_size=_HASH).digest() != joined[:_HASH]:
            raise ValueError("the record's byte strings are damaged, or none of fcl-bench")
        (count,) = _LENGTH.unpack_from(joined, _HASH)
        lengths = struct.unpack_from(f"<{count}q", joined, _HASH + _LENGTH.size)
    except (KeyError, struct.error) as error:
        raise ValueError(f"the record has no byte strings of fcl-bench: {error}") from error
    found, start = [], _HASH + _LENGTH.size * (1 + count)
    if min(lengths, default=0) < 0 or start + sum(lengths) != len(joined):
        raise ValueError("the record's byte strings do not have the lengths that it gives")
    for length in lengths:
        found.append(joined[start : start + length])
        start += length
    return found
