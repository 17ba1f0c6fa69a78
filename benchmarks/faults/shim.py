"""A layer between a process and its files: it counts every change of the disk, and makes one of them fail.

Python tells its audit hooks of every open, rename, unlink, mkdir before it happens, for every library. It does not
report writes and fsyncs, so files that are opened for writing use a `FileIO` subclass of ours. safetensors writes in
Rust: its one function counts as one write.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults.forks import KILLED

#: What happens at the chosen point: an error this once; from then on whatever needs room; the end of the process.
FAILS, FULL, STOPS = "fails", "full", "stops"
KINDS = (FAILS, FULL, STOPS)

#: Audit events, where their paths are, and whether they need room on the disk.
_EVENTS = {
    "os.rename": ((0, 1), False),
    "os.remove": ((0,), False),
    "os.rmdir": ((0,), False),
    "os.chmod": ((0,), False),
    "os.truncate": ((0,), False),
    "os.mkdir": ((0,), True),
    "os.link": ((0, 1), True),
    "os.symlink": ((1,), True),
}


class Shim:
    """Counts the points below `root` from `install` on; nothing can take it out again, so it is for a child process.

    Args:
        root: of the files that count.
        at: the point, from 0, at which it acts; -1 for none.
        how: one of `KINDS`.
        trace: gets a line per point.
    """

    def __init__(self, root: Path, at: int = -1, how: str = FAILS, trace: list[str] | None = None) -> None:
        self._root, self._at, self._how, self._trace = str(root), at, how, trace
        self._count = 0
        self._acting = False

    def install(self) -> None:
        opened = builtins.open

        def watched(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
            # With an opener, what is opened is not `file`: the hook hears of it all the same.
            if not set(mode) & set("wax+") or named.get("opener") or not self._below(file):
                return opened(file, mode, buffering, *rest, **named)
            return self._opened(file, mode, buffering, *rest, **named)

        builtins.open = io.open = watched  # type: ignore[assignment]
        accessor = getattr(sys.modules["pathlib"], "_normal_accessor", None)  # of Python 3.10
        if accessor is not None:
            accessor.open = watched
        synced = os.fsync

        def fsync(handle: int) -> None:
            self.reached("fsync", os.readlink(f"/proc/self/fd/{handle}"), errno.EIO, needs_room=True)
            synced(handle)

        os.fsync = fsync
        self._watch_safetensors()
        sys.addaudithook(self._heard)

    def reached(
        self, what: str, path: str, error: int, needs_room: bool, half: Callable[[], object] | None = None
    ) -> None:
        """A point: nothing happens, or it goes wrong here.

        Args:
            what: is about to be done.
            path: to what.
            error: the number of the error, if it is to fail.
            needs_room: whether a full disk refuses it.
            half: does one half of it.
        """
        if self._acting or not path.startswith(self._root):
            return
        number, self._count = self._count, self._count + 1
        if self._trace is not None:
            self._trace.append(f"{what} {path.removeprefix(self._root)}")
        full = self._how == FULL and self._at >= 0 and number > self._at and needs_room
        if number != self._at and not full:
            return
        if self._how == FULL and not needs_room:
            return
        self._acting = True
        if half is not None:
            half()
        if self._how == STOPS:
            os._exit(KILLED)
        self._acting = False
        number = errno.ENOSPC if self._how == FULL else error
        raise OSError(number, os.strerror(number), path)

    def _below(self, file: Any) -> bool:
        return not isinstance(file, int) and os.path.abspath(os.fspath(file)).startswith(self._root)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = (flags or 0) & (os.O_WRONLY | os.O_RDWR) or set(mode or "r") & set("wax+")
            if isinstance(path, int) or not writes:
                return
            # Whoever opens what is there needs no room.
            self.reached("open", _text(path), errno.ENOSPC, needs_room=not os.path.exists(path))
        elif event in _EVENTS:
            places, needs_room = _EVENTS[event]
            path = next((text for place in places if (text := _text(arguments[place])).startswith(self._root)), None)
            # Relative to a folder's handle, as rmtree names them: the folder is one of ours, since nobody else deletes.
            relative = event in ("os.remove", "os.rmdir") and not os.path.isabs(_text(arguments[0]))
            if relative:
                path = f"{self._root}/.../{_text(arguments[0])}"
            if path is not None:
                self.reached(event, path, errno.ENOSPC if needs_room else errno.EIO, needs_room)

    def _opened(
        self,
        file: Any,
        mode: str,
        buffering: int,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        **_: Any,
    ) -> Any:
        """As `open` makes a file, of a raw file that counts its writes."""
        raw = _Raw(self, file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        binary = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        if "b" in mode:
            return binary
        text = io.TextIOWrapper(binary, encoding or "utf-8", errors, newline, line_buffering=buffering == 1)
        text.mode = mode  # type: ignore[misc]
        return text

    def _watch_safetensors(self) -> None:
        import safetensors.torch
        from safetensors import SafetensorError

        whole = safetensors.torch.serialize_file

        def serialize_file(tensors: Any, filename: Any, *rest: Any, **named: Any) -> None:
            path = Path(filename)

            def half() -> None:
                whole(tensors, filename, *rest, **named)
                os.truncate(path, path.stat().st_size // 2)

            try:
                self.reached("safetensors", str(path.absolute()), errno.ENOSPC, needs_room=True, half=half)
            except OSError as error:
                # In its own words.
                told = f"Error while serializing: I/O error: {error.strerror} (os error {error.errno})"
                raise SafetensorError(told) from None
            whole(tensors, filename, *rest, **named)

        safetensors.torch.serialize_file = serialize_file


class _Raw(io.FileIO):
    """A file whose writes are points."""

    def __init__(self, shim: Shim, file: Any, mode: str) -> None:
        self._shim = shim
        super().__init__(file, mode)

    def write(self, data: Any) -> int:
        def half() -> None:
            io.FileIO.write(self, memoryview(data).cast("B")[: len(data) // 2])

        self._shim.reached("write", os.path.abspath(self.name), errno.ENOSPC, needs_room=True, half=half)
        return super().write(data)

    def truncate(self, size: int | None = None) -> int:
        self._shim.reached("truncate", os.path.abspath(self.name), errno.EIO, needs_room=False)
        return super().truncate(size)


def _text(path: Any) -> str:
    return os.fsdecode(os.fspath(path)) if not isinstance(path, int) else ""
