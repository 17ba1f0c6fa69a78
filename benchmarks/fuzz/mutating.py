"""Malformed input from good input: other bytes, other values in JSON, other characters, other arrays."""

from __future__ import annotations

import io
import json
import random
import zipfile
from typing import Any

import numpy as np

#: Bytes over which decoders stumble.
_BYTES = (0, 1, 0x7F, 0x80, 0xFF, 0x0A, 0x22, 0x5B, 0x7B, 0x1B)
#: Lengths and counts that no input has.
_LENGTHS = (0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1)
_TEXTS = (
    "",
    "\0",
    "\x1b[31m",
    "a\nb",
    "\u202eabc",
    "\ud800",
    "../../x",
    "=1+1",
    "é" * 40,
    "x" * 5000,
    "float64",
    "nan",
)
_NUMBERS = (-1, 0, 1, 2.5, -0.0, 1e308, 2**31, 2**53, 2**63, 2**70, float("nan"), float("inf"), float("-inf"))
_TYPES = ("<f8", "<f4", ">f8", "<f2", "<i8", "<i1", "<u8", "?", "<c8", "<U3", "S3", "<M8[s]", "<m8[s]", "<V4")


def bytes_of(rng: random.Random, good: bytes) -> bytes:
    """`good` with one to four changes."""
    made = bytearray(good)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made) + 1)
        end = min(len(made), at + rng.choice((1, 1, 2, 8, 64, 512)))
        kind = rng.randrange(8)
        if kind == 0:
            made[at:end] = bytes(rng.choice(_BYTES) for _ in range(end - at))
        elif kind == 1:
            made[at:end] = rng.randbytes(end - at)
        elif kind == 2:
            del made[at:end]
        elif kind == 3:
            made[at:at] = rng.randbytes(rng.randint(1, 16))
        elif kind == 4:
            made[at:at] = made[at:end]
        elif kind == 5:
            del made[at:]
        elif kind == 6:
            made[at : at + 8] = rng.choice(_LENGTHS).to_bytes(8, rng.choice(("little", "big")))
        elif at < len(made):
            made[at] ^= 1 << rng.randrange(8)
    return bytes(made)


def value(rng: random.Random, depth: int = 3) -> Any:
    """Anything that JSON holds."""
    kind = rng.randrange(8 if depth else 6)
    if kind < 2:
        return rng.choice(_NUMBERS)
    if kind < 4:
        return rng.choice(_TEXTS)
    if kind < 6:
        return rng.choice((None, True, False, [], {}, rng.randint(-9, 9)))
    parts = [value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return parts if kind == 6 else {rng.choice(_TEXTS): part for part in parts}


def json_of(rng: random.Random, good: Any) -> Any:
    """JSON with another value in one to three places, or without it; `good` itself stays."""
    made = json.loads(json.dumps(good))
    for _ in range(rng.randint(1, 3)):
        holder: Any = None
        node, key = made, None
        while isinstance(node, dict | list) and node and (holder is None or rng.random() < 0.8):
            holder, key = node, rng.choice([*(node if isinstance(node, dict) else range(len(node)))])
            node = node[key]
        if holder is None:
            return value(rng)
        change = rng.randrange(6)
        if change == 0:
            del holder[key]
        elif change == 1 and isinstance(holder, dict):
            holder[rng.choice(_TEXTS)] = node
        elif change == 2 and isinstance(node, int | float) and not isinstance(node, bool):
            holder[key] = node + rng.choice((-1, 1, 0.5, 2**31, 2**62))
        else:
            holder[key] = value(rng)
    return made


def text_of(rng: random.Random, good: str) -> bytes:
    """A text file with other characters, lines and cells."""
    lines = good.split("\n")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        cells = lines[at].split(",")
        kind = rng.randrange(6)
        if kind == 0:
            cells[rng.randrange(len(cells))] = str(rng.choice((*_TEXTS, *_NUMBERS)))
            lines[at] = ",".join(cells)
        elif kind == 1:
            del lines[at : at + rng.choice((1, 1, 1000))]
        elif kind == 2:
            lines[at:at] = [lines[at]] * rng.choice((1, 2, 50))
        elif kind == 3:
            lines[at] = ",".join(cells[: rng.randrange(len(cells) + 1)])
        elif kind == 4:
            lines[at] += rng.choice((",", '"', ",1", "\t", "\r", "'"))
        else:
            lines[at] = rng.choice(_TEXTS) + lines[at]
        lines = lines or [""]
    made = "\n".join(lines).encode(errors="surrogatepass")
    return bytes_of(rng, made) if rng.random() < 0.2 else made


def array_of(rng: random.Random, good: np.ndarray) -> np.ndarray:
    """An array of another type, shape or content."""
    kind = rng.randrange(6)
    with np.errstate(all="ignore"):
        if kind == 0:
            return np.resize(good, rng.choice(((), (0,), (1,), (3, 0), (2, 2, 2), (7,), (5, 1)))).astype(good.dtype)
        if kind == 1:
            return np.zeros(good.shape, dtype=rng.choice(_TYPES))
        if kind == 2 and good.size and good.dtype.kind in "fiu":
            made = good.astype(np.float64)
            made.flat[rng.randrange(good.size)] = rng.choice([number for number in _NUMBERS if number == number])
            return made
        if kind == 3 and good.size and good.dtype.kind == "f":
            made = good.copy()
            made.flat[rng.randrange(good.size)] = np.nan
            return made
        if kind == 4:
            return np.array([rng.choice(_TEXTS).replace("\ud800", "?")[:60] for _ in range(len(good))])
    return good[: rng.randrange(len(good) + 1)]


def npz_of(rng: random.Random, good: dict[str, np.ndarray]) -> bytes:
    """An .npz file, damaged as a file, in one of its members' headers, or of other arrays."""
    arrays = dict(good)
    kind = rng.randrange(4)
    if kind == 0:
        name = rng.choice([*arrays])
        arrays[name] = array_of(rng, arrays[name])
        if rng.random() < 0.2:
            del arrays[name]
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array, allow_pickle=False)
            held = member.getvalue()
            if kind == 1 and rng.random() < 0.5:
                held = bytes_of(rng, held[:128]) + held[128:]
            elif kind == 2 and rng.random() < 0.5:
                shape = f"({rng.choice(_LENGTHS)}, {rng.choice(_LENGTHS)})".encode()
                held = held.replace(str(array.shape).encode(), shape)
            archive.writestr(f"{name}.npy", held)
    made = content.getvalue()
    return bytes_of(rng, made) if kind == 3 else made
