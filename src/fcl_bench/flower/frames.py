"""Frames on a stream socket: a JSON header and byte strings, each with its length. Nothing is pickled.

Flower's own processes import this module, so it imports neither torch nor anything else that takes long.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fcl_bench.errors import machine_memory

_LENGTH = 8
#: The largest size of a header; a longer one does not come from fcl-bench.
_LONGEST_HEADER = 1 << 22
#: Bytes that are read at a time: memory is taken for what has come, and not for what is announced.
_PIECE = 1 << 20


#: How the error begins of an answer that no other answer of the same node could mend.
REFUSED = "not taken: "


class Frame(NamedTuple):
    """One message from one side to the other.

    Attributes:
        header: as JSON.
        blobs: byte strings beside it.
    """

    header: dict[str, Any]
    blobs: list[bytes]


def send(line: socket.socket, header: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
    """Write one frame."""
    text = json.dumps({"header": header, "lengths": [len(blob) for blob in blobs]}).encode()
    line.sendall(len(text).to_bytes(_LENGTH, "little") + text)
    for blob in blobs:
        line.sendall(blob)


def receive(line: socket.socket, most: int | None = None) -> Frame | None:
    """Read one frame; None where the other side has closed the line between two frames.

    Args:
        most: bytes that all byte strings may have together; None: as many as the machine holds.

    Raises:
        ConnectionError: the line ends within a frame, or what came is no frame.
    """
    length = _read(line, _LENGTH, at_start=True)
    if length is None:
        return None
    size = int.from_bytes(length, "little")
    if size > _LONGEST_HEADER:
        raise ConnectionError(f"a header of {size} bytes is none")
    try:
        about = json.loads(_read(line, size) or b"")
        header, lengths = dict(about["header"]), list(about["lengths"])
        if not all(type(length) is int and length >= 0 for length in lengths):
            raise ValueError("a length is no length")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConnectionError(f"what came is no frame: {error}") from error
    most = machine_memory() if most is None else most
    if sum(lengths) > most:
        raise ConnectionError(f"a frame announces {sum(lengths)} bytes, where at most {most} are expected")
    return Frame(header, [_read(line, length) or b"" for length in lengths])


def _read(line: socket.socket, size: int, at_start: bool = False) -> bytes | None:
    content = bytearray()
    while len(content) < size:
        got = line.recv(min(size - len(content), _PIECE))
        if not got:
            if at_start and not content:
                return None
            raise ConnectionError(f"the line ended after {len(content)} of {size} bytes")
        content += got
    return bytes(content)


def listener(path: Path) -> socket.socket:
    """A Unix socket that listens at `path`, which only this user may connect to."""
    path.unlink(missing_ok=True)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.bind(str(path))
        path.chmod(0o600)
        line.listen()
    except OSError:
        line.close()
        raise
    return line


def connected(path: str) -> socket.socket:
    """A line to whoever listens at `path`. Raises OSError where nobody does."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.connect(path)
    except OSError:
        line.close()
        raise
    return line
