"""Mutations that damage files: generic ones of the bytes, and ones specific to a format.

Every mutation takes the file's bytes and a generator, so that a case is repeated by its seed, and Hypothesis can draw.
"""

from __future__ import annotations

import io
import json
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from fcl_bench.files import json_hash

Mutation = Callable[[bytes, random.Random], bytes]


def truncated(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))] if content else b""


def flipped(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def spliced(content: bytes, rng: random.Random) -> bytes:
    """Insert a copy of a piece of the file in another place."""
    begin, to = rng.randrange(len(content) + 1), rng.randrange(len(content) + 1)
    return content[:to] + content[begin : begin + rng.randrange(1, 200)] + content[to:]


def cut_out(content: bytes, rng: random.Random) -> bytes:
    begin = rng.randrange(len(content) + 1)
    return content[:begin] + content[begin + rng.randrange(1, 64) :]


def with_zeros(content: bytes, rng: random.Random) -> bytes:
    """Replace a block by zeros, as a file system leaves one that was never written."""
    begin = rng.randrange(len(content) + 1)
    gone = content[begin : begin + 512]
    return content[:begin] + bytes(len(gone)) + content[begin + len(gone) :]


def with_huge_number(content: bytes, rng: random.Random) -> bytes:
    """Put a huge number somewhere in the first or last bytes, where formats keep lengths."""
    size, value = rng.choice(((4, b"\xff"), (8, b"\xff"), (4, b"\x7f"), (8, b"\x7f")))
    begin = rng.randrange(min(len(content), 300) + 1)
    begin = begin if rng.random() < 0.6 else max(0, len(content) - begin - size)
    return content[:begin] + size * value + content[begin + size :]


def twice(content: bytes, rng: random.Random) -> bytes:
    return content + content


def of_another_kind(content: bytes, rng: random.Random) -> bytes:
    return rng.choice(_OTHERS)


_OTHERS = (
    *(b"", bytes(4096), b"hello\n", b"{}", b"[]", b"null", b"PK\x05\x06" + bytes(18), b"\x80\x04N.", b"PAR1" * 4),
    *(b"\x89PNG\r\n\x1a\n", b"GIF89a", b"NaN", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\xff" * 64, b"a: &a [*a, *a]\n"),
)
#: Of any file.
BYTES: dict[str, Mutation] = {
    "truncated": truncated,
    "flipped": flipped,
    "spliced": spliced,
    "cut out": cut_out,
    "with zeros": with_zeros,
    "with a huge number": with_huge_number,
    "twice": twice,
    "of another kind": of_another_kind,
}


# npz ------------------------------------------------------------------------------------------------------------------


def _arrays(content: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(content)) as file:
        return {name: file[name] for name in file.files}


def _npz(arrays: dict[str, np.ndarray], **named: bytes) -> bytes:
    """The arrays of the file; other members as bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive:
        for name, member in named.items():
            archive.writestr(f"{name}.npy", member)
    return buffer.getvalue()


def _header(text: str) -> bytes:
    line = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(line)) + line


def of_another_type(content: bytes, rng: random.Random) -> bytes:
    arrays = _arrays(content)
    name = rng.choice(sorted(arrays))
    kind = rng.choice(
        ("complex64", "S4", "U3", "M8[s]", "float16", ">f8", "int8", "uint64", "bool", "V8", "longdouble")
    )
    with np.errstate(all="ignore"):
        arrays[name] = np.zeros(arrays[name].shape, kind) if kind in ("M8[s]", "V8") else arrays[name].astype(kind)
    return _npz(arrays)


def of_another_shape(content: bytes, rng: random.Random) -> bytes:
    arrays = _arrays(content)
    name = rng.choice(sorted(arrays))
    value = arrays[name]
    changes = (
        value[:0],
        value[:-1],
        value[None],
        value.reshape(-1),
        value[..., None],
        value[:1].repeat(3, 0),
        value[0],
    )
    arrays[name] = rng.choice(changes)
    return _npz(arrays)


def with_bad_numbers(content: bytes, rng: random.Random) -> bytes:
    arrays = _arrays(content)
    name = rng.choice(sorted(arrays))
    value = arrays[name].copy()
    bad = (np.nan, np.inf, -np.inf, 1e30, 0) if value.dtype.kind == "f" else (-1, 2**62, 10**6, 0)
    value.flat[rng.randrange(value.size)] = rng.choice(bad)
    arrays[name] = value
    return _npz(arrays)


def with_a_wrong_header(content: bytes, rng: random.Random) -> bytes:
    """A header that promises more than there is, or runs code where it is believed."""
    arrays = _arrays(content)
    name = rng.choice(sorted(arrays))
    del arrays[name]
    shape = rng.choice(("(1099511627776, 12)", "(-1, 12)", "(2147483648, 2147483648)", "(60,)", "(60.5, 12)", "()"))
    kind = rng.choice(("<f4", "|O", "<f99", "|V8", "<i8"))
    header = _header(f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}")
    return _npz(arrays, **{name: header + bytes(64)})


def with_a_bomb(content: bytes, rng: random.Random) -> bytes:
    """4 GiB of zeros in 4 MiB, with a header that is right."""
    arrays = _arrays(content)
    name = rng.choice(("x_train", "x_test"))
    arrays.pop(name, None)
    buffer = io.BytesIO(_npz(arrays))
    rows, block = 1 << 26, bytes(1 << 20)
    with (
        zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open(f"{name}.npy", "w", force_zip64=True) as member,
    ):
        member.write(_header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, 16), }}"))
        for _ in range(rows * 64 // len(block)):
            member.write(block)
    return buffer.getvalue()


def with_a_member_twice(content: bytes, rng: random.Random) -> bytes:
    arrays = _arrays(content)
    name = rng.choice(sorted(arrays))
    other = io.BytesIO()
    np.save(other, arrays[name][::-1])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Duplicate name")
        return _npz(arrays, **{name: other.getvalue()})


def without_a_member(content: bytes, rng: random.Random) -> bytes:
    arrays = _arrays(content)
    del arrays[rng.choice(sorted(arrays))]
    return _npz(arrays)


NPZ: dict[str, Mutation] = {
    "of another type": of_another_type,
    "of another shape": of_another_shape,
    "with bad numbers": with_bad_numbers,
    "with a wrong header": with_a_wrong_header,
    "with a member twice": with_a_member_twice,
    "without a member": without_a_member,
}


# safetensors ----------------------------------------------------------------------------------------------------------


def with_another_header(content: bytes, rng: random.Random) -> bytes:
    """The JSON that says where tensors are: other types, shapes, places, lengths."""
    (length,) = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    name = rng.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    change = rng.randrange(8)
    if change == 0:
        entry["dtype"] = rng.choice(("F64", "BOOL", "I8", "X9", 7, None))
    elif change == 1:
        entry["shape"] = rng.choice(([1 << 40], [-1], [0], [1 << 32, 1 << 32], "x", [1.5]))
    elif change == 2:
        entry["data_offsets"] = rng.choice(([0, 1 << 40], [8, 0], [-8, 8], [0, 0], []))
    elif change == 3:
        del header[name]
    elif change == 4:
        header[f"{name}2"] = dict(entry)
    elif change == 5:
        header.pop("__metadata__", None)
    elif change == 6:
        header["__metadata__"] = rng.choice(({"checksum": "0"}, {"key": 5}, [], {"seconds": "x"}))
    else:
        del entry[rng.choice(sorted(entry))]
    text = json.dumps(header).encode()
    length = len(text) if rng.random() < 0.8 else rng.choice((1 << 62, (1 << 64) - 1, 0, len(text) - 1))
    return struct.pack("<Q", length) + text + content[8 + struct.unpack("<Q", content[:8])[0] :]


def with_other_numbers(content: bytes, rng: random.Random) -> bytes:
    """Flip bits behind the header: in a small file most flips hit the header, which safetensors itself refuses."""
    (length,) = struct.unpack("<Q", content[:8])
    return content[: 8 + length] + flipped(content[8 + length :], rng)


SAFETENSORS: dict[str, Mutation] = {
    "with another header": with_another_header,
    "with other numbers": with_other_numbers,
}


# JSON and CSV ---------------------------------------------------------------------------------------------------------

_STRANGE = (None, -1, 1e308, "x", "", [], {}, [[]], True, 2**70, "../x", "\x1b[31m", float("nan"))


def _changed_somewhere(node: Any, rng: random.Random) -> Any:
    """Replace one value of a JSON tree, or remove a key."""
    places: list[tuple[Any, Any]] = []

    def walk(inner: Any) -> None:
        if isinstance(inner, (dict, list)):
            for key in inner if isinstance(inner, dict) else range(len(inner)):
                places.append((inner, key))
                walk(inner[key])

    walk(node)
    if places:
        inner, key = rng.choice(places)
        if isinstance(inner, dict) and rng.random() < 0.3:
            del inner[key]
        else:
            inner[key] = rng.choice(_STRANGE)
    return node


def edited_json(content: bytes, rng: random.Random) -> bytes:
    """Edit the JSON by hand: its checksum stays the old one."""
    return json.dumps(_changed_somewhere(json.loads(content), rng), indent=2).encode()


def edited_and_sealed(content: bytes, rng: random.Random) -> bytes:
    """Edit the JSON as somebody who knows the code would: the checksum fits the new content."""
    node = _changed_somewhere(json.loads(content), rng)
    if isinstance(node, dict):
        node["checksum"] = json_hash({key: value for key, value in node.items() if key != "checksum"})
    return json.dumps(node, indent=2).encode()


JSON: dict[str, Mutation] = {"edited": edited_json}
SEALED: dict[str, Mutation] = {"edited and sealed": edited_and_sealed}


def with_another_cell(content: bytes, rng: random.Random) -> bytes:
    lines = content.decode().splitlines()
    row = rng.randrange(len(lines))
    cells = lines[row].split(",")
    cells[rng.randrange(len(cells))] = rng.choice(("", "x", "nan", "-1", "1e999", '"', "9" * 400, "\0"))
    lines[row] = ",".join(cells)
    return ("\n".join(lines) + "\n").encode()


CSV: dict[str, Mutation] = {"with another cell": with_another_cell}


# YAML -----------------------------------------------------------------------------------------------------------------


def with_another_line(content: bytes, rng: random.Random) -> bytes:
    lines = content.decode().splitlines()
    extra = (
        *("a: b: c", "\tx: 1", "_target_: os.system", "rank: !!python/object/apply:os.system [true]", "? [a]", "<<: 5"),
        *("gamma: ${oc.env:HOME}", "gamma: ${gamma}", "M: ${nowhere.x}", "? {a: 1}\n: 2", "5: 6", "M: &m [*m]", "- 1"),
        *("defaults: [nowhere]", "defaults: [/method: stsa]", "M: 2001-01-01", "M: 0x7fffffffffffffffff", "M: 1_000"),
    )
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(extra))
    return ("\n".join(lines) + "\n").encode()


YAML: dict[str, Mutation] = {"with another line": with_another_line}


# Images and tables of the hub -----------------------------------------------------------------------------------------


def png_of_many_pixels(content: bytes, rng: random.Random) -> bytes:
    """A small file that says it is 40,000 pixels wide and high, with a checksum that is right."""
    import zlib

    side = rng.choice((40_000, 200_000, 2**31 - 1, 0))
    chunk = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    start = content[:8] + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return start + content[33:]


PNG: dict[str, Mutation] = {"of many pixels": png_of_many_pixels}
