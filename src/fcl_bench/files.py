"""Files that are whole or absent, the checksums that show which of the two, and JSON that holds its own checksum."""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from filelock import FileLock, Timeout

from fcl_bench.errors import UserError, printable

log = logging.getLogger(__name__)
_Place = TypeVar("_Place", bound=Path | str)

#: The errors of network file systems that can't write a folder's entries out.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)
#: The name of what is there in place of a file, by the type in its mode.
_SPECIAL = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


#: What `content_hash` returns.
Hash = hashlib.blake2b


def content_hash(content: Any = b"") -> Hash:
    """The hash behind every fingerprint and checksum (BLAKE2b, 128 bits), of these bytes and of those added later."""
    return hashlib.blake2b(content, digest_size=16)


def json_hash(content: Any) -> str:
    """Hash of `content`, independent of the order of its keys; a value that JSON has no form for counts as its text."""
    return content_hash(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def file_checksum(path: Path | str, digest: Any = None) -> str:
    """Hash of a file's bytes, by `digest` or else `content_hash`. Raises OSError for no file or an unreadable one."""
    digest = digest or content_hash()
    with open(regular(path), "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def user_path(key: str, given: str) -> Path:
    """The path that a user typed, with `~` expanded. Raises a UserError for a text that cannot be a path."""
    try:
        path = Path(given).expanduser()
        path.lstat()
    except RuntimeError as error:
        raise UserError(f"{key}={given} begins with a user who is not here", "the folder's whole path") from error
    except FileNotFoundError:
        return path
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            return path
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{key}={given} is not a path: {why}", "another path") from error
    return path


def special(path: Path | str) -> str:
    """What is at `path` in place of a file ("a FIFO", "a folder"); "" for a file, and where nothing is."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return ""
    return "" if stat.S_ISREG(mode) else _SPECIAL.get(stat.S_IFMT(mode), "no file")


def regular(path: _Place) -> _Place:
    """`path` itself. Raises OSError if a FIFO, a device or the like is there: opening one may block for ever."""
    if found := special(path):
        raise OSError(errno.EISDIR if found == "a folder" else errno.EINVAL, f"it is {found}", str(path))
    return path


def slug(name: str) -> str:
    """`name` as part of a file name: letters, digits, `_`, `.` and `+`, at most 60 of them."""
    return re.sub(r"[^\w.+]", "_", name)[:60]


def csv_cell(value: Any) -> Any:
    """`value` as a cell of a CSV file: text that a spreadsheet would take for a formula begins with an apostrophe."""
    value = printable(value, "\t\r") if isinstance(value, str) else value
    if not isinstance(value, str) or value[:1] not in ("=", "+", "-", "@", "\t", "\r") or _is_number(value):
        return value
    return f"'{value}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@contextmanager
def replacing(path: Path, permissions: int = 0o666) -> Iterator[Path]:
    """A temporary path beside `path` that replaces it, atomically, when the block ends without an error; it never
    has more than these permissions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}-{uuid.uuid4().hex}{path.suffix}")
    temporary.touch(permissions)
    mode = temporary.stat().st_mode  # the user's usual mode; some libraries would create files only the owner can read
    try:
        yield temporary
        temporary.chmod(mode)
        _to_disk(temporary)
        os.replace(temporary, path)
        _to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def appending(path: Path, size: int) -> Iterator[BinaryIO]:
    """The file at `path`, made if needed and cut to its first `size` bytes, open for appending; on disk at the end.

    Raises:
        OSError: the file has fewer bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("r+b" if not fresh else "w+b") as file:
        # Only if there is more: on some file systems truncation takes as long as the rest, even to the current size.
        there = file.seek(0, os.SEEK_END)
        if there < size:
            raise OSError(errno.EIO, f"{size - there} bytes of it are gone", str(path))
        if there > size:
            file.truncate(size)
        file.seek(size)
        yield file
    _to_disk(path)
    if fresh:
        _to_disk(path.parent)


def writable(key: str, folder: Path) -> Path:
    """`folder`, created if needed. Raises a UserError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{key}: {folder} cannot be written: {why}", "a folder that you may write to") from error


def remove(path: Path) -> None:
    """Delete a file, or a folder with all that it holds; of a symbolic link the link alone. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_leftovers(path: Path) -> None:
    """Delete the temporary files that a killed process left for `path`. Only the holder of its lock may call this."""
    for leftover in path.parent.glob(f".{path.stem}-*{path.suffix}"):
        leftover.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """The lock at `path`, held for the block and freed even if the process dies; says so when it has to wait.

    Raises:
        OSError: the file system has no locks, or nothing can be written there.
    """
    lock = FileLock(path)
    try:
        try:
            lock.acquire(timeout=1)
        except Timeout:
            log.info("another process is %s; waiting for it", what)
            lock.acquire()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # flock's own has no name
    try:
        yield
    finally:
        lock.release()


def _to_disk(path: Path) -> None:
    """Make the system write out a file or a folder's entries, so that a rename never precedes its content.

    Raises:
        OSError: this failed, so it is not known what is on the disk.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC or not path.is_dir():
            raise OSError(error.errno, error.strerror, str(path)) from error
        log.debug("%s: no fsync of a folder (%s)", path, error)
    finally:
        os.close(handle)


def _checksum(content: Mapping[str, Any]) -> str:
    return json_hash({key: value for key, value in content.items() if key != "checksum"})


def write_json(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Write `content` with a checksum of itself; returns what was written."""
    # It goes through JSON once, so that the checksum covers what a reader will see (lists for tuples, text for keys).
    written: dict[str, Any] = json.loads(json.dumps(content, allow_nan=False))
    written["checksum"] = _checksum(written)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(written, indent=2) + "\n")
    return written


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote. Raises ValueError if it does not match its checksum, OSError if it is not a file."""
    content = json.loads(regular(path).read_text())
    if not isinstance(content, dict) or content.get("checksum") != _checksum(content):
        raise ValueError("it does not match its own checksum")
    return content
