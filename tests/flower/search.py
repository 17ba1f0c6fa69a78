"""Looks in captured bytes for what may not be there."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

#: How an entry of an archive begins, and the lengths of its name and of what follows before its content.
_ENTRY, _HEADER = b"PK\x03\x04", struct.Struct("<26xHH")
_FLOATS, _WHOLE = ("float64", "float32", "float16"), ("int64", "int32", "int16", "uint8")


def unpacked(captured: bytes) -> bytes:
    """The bytes, and after them what is compressed in ZIP archives within them: Flower sends its apps as such."""
    found, start = [captured], captured.find(_ENTRY)
    while start >= 0:
        if len(header := captured[start : start + _HEADER.size]) == _HEADER.size:
            with suppress(zlib.error):  # an entry that is not compressed
                body = captured[start + _HEADER.size + sum(_HEADER.unpack(header)) :]
                found.append(zlib.decompressobj(-zlib.MAX_WBITS).decompress(body))
        start = captured.find(_ENTRY, start + 1)
    return b"\n".join(found)


def found_words(captured: bytes, words: Iterable[str]) -> list[str]:
    """The words that are there, in UTF-8 or UTF-16."""
    return [word for word in words if word.encode() in captured or word.encode("utf-16-le") in captured]


def found_arrays(captured: bytes, rows: np.ndarray) -> list[int]:
    """Which rows (n, d) are there, as numbers of any usual type, or as JSON."""
    types = _FLOATS if rows.dtype.kind == "f" else _FLOATS + _WHOLE
    found = []
    for place, row in enumerate(rows):
        forms = [row.astype(name).tobytes() for name in types] + [json.dumps(row.tolist())[1:-1].encode()]
        if any(form in captured for form in forms):
            found.append(place)
    return found
