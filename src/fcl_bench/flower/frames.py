"""Frames on a stream socket: a JSON header and byte strings, each with its length. Nothing is pickled.

Flower's own processes import this module, so it imports neither torch nor anything else that takes long.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_LENGTH = 8
#: The largest size of a header; a longer one does not come from fcl-bench.
_LONGEST_HEADER = 1 << 26


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


def receive(line: socket.socket) -> Frame | None:
    """Read one frame; None where the other side has closed the line between two frames.

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
        header, lengths = dict(about["header"]), [int(length) for length in about["lengths"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConnectionError(f"what came is no frame: {error}") from error
    return Frame(header, [_read(line, length) or b"" for length in lengths])


def _read(line: socket.socket, size: int, at_start: bool = False) -> bytes | None:
    content = bytearray(size)
    view, done = memoryview(content), 0
    while done < size:
        got = line.recv_into(view[done:])
        if not got:
            if at_start and not done:
                return None
            raise ConnectionError(f"the line ended after {done} of {size} bytes")
        done += got
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
