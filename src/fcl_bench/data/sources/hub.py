"""Parquet files of a data set on the Hugging Face hub: found on this machine, or downloaded and verified.

A download goes to <HF_HOME>/fcl-bench/<owner>/<name>/<commit>/, with the files' sizes and checksums in files.json, so
that a folder can be copied to a machine without network and named there by data.path. Files that the hub's own cache
already has are used in place.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fcl_bench.data.sources.hub_reach import unreachable
from fcl_bench.errors import UserError, first_line
from fcl_bench.files import file_checksum, locked, replacing, writable
from fcl_bench.tracking.console import progress

log = logging.getLogger(__name__)

#: The file with the sizes and checksums of the files beside it.
MANIFEST = "files.json"


@dataclass(frozen=True)
class Repository:
    """The files wanted from one repository of the hub.

    Attributes:
        data: what to call the data set in messages.
        repo: hub name ("uoft-cs/cifar100").
        revision: commit, branch or tag; None: whatever the main branch holds.
        splits: the splits whose files are wanted.
        place: where a user can put the files instead, as `data.path` or below it.

    Raises:
        UserError: the revision is not a valid git name. Both caches use it in a path, and would follow "/dev/zero".
    """

    data: str
    repo: str
    revision: str | None
    splits: tuple[str, ...]
    place: str = "data.path=FOLDER"

    def __post_init__(self) -> None:
        if self.revision is not None and (".." in self.revision or not re.fullmatch(r"\w[\w./+-]*", self.revision)):
            raise UserError(f"data.revision={self.revision} is no commit, branch or tag", "a commit; null: the newest")


@dataclass(frozen=True)
class HubFile:
    """A file as the hub lists it.

    Attributes:
        path: within the repository.
        size: in bytes.
        sha256: hash of the content; None for the small files that the hub keeps in git.
        blob: git's own hash of the content, or of the pointer file in its place.
    """

    path: str
    size: int
    sha256: str | None
    blob: str

    def matches(self, file: Path) -> bool:
        """Whether `file` has this content."""
        if file.stat().st_size != self.size:
            return False
        if self.sha256 is not None:
            return file_checksum(file, hashlib.sha256()) == self.sha256
        git = hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)
        return file_checksum(file, git) == self.blob


@dataclass(frozen=True)
class Snapshot:
    """A repository's files on this machine.

    Attributes:
        folder: where they lie.
        commit: commit of the hub repository.
        files: the files of each split, sorted by name.
    """

    folder: Path
    commit: str
    files: dict[str, list[Path]]


def locate(wanted: Repository) -> Snapshot | None:
    """The files on this machine, without any use of the network; None if any is missing."""
    for folder in _downloads(wanted):
        if found := _whole(folder, wanted):
            return found
    return _in_hub_cache(wanted)


def fetch(wanted: Repository) -> Snapshot:
    """The files, downloaded if they are not here. Raises a `UserError` where that can't be done."""
    return locate(wanted) or download(wanted)


def download(wanted: Repository) -> Snapshot:
    """Download the files that are missing, and verify each one's checksum.

    Raises:
        UserError: no network, no such repository, no disk space, or a file that arrived damaged (it is removed).
    """
    commit, files = _listing(wanted)
    folder = writable("HF_HOME", own_folder(wanted, commit))
    with locked(folder.parent / f".{commit}.lock", f"downloading {wanted.repo}"):
        if manifest(folder) != files:
            with replacing(folder / MANIFEST) as temporary:
                temporary.write_text(json.dumps([asdict(file) for file in files], indent=1) + "\n")
        missing = [file for file in files if not _has_size(folder, file)]
        rest = sum(file.size for file in missing)
        if missing:
            log.info("data %s: downloading %s from the hub to %s", wanted.data, readable(rest), folder)
        if rest > (free := shutil.disk_usage(folder).free):
            raise UserError(
                f"data={wanted.data} needs {readable(rest)} in {folder} and {readable(free)} are free",
                "HF_HOME=FOLDER with more room",
            )
        for number, file in enumerate(missing, start=1):
            # A terminal also shows a progress bar; a log file has only this line.
            log.info("data %s: file %d of %d, %s", wanted.data, number, len(missing), readable(file.size))
            _download_file(wanted, commit, folder, file)
    found = _whole(folder, wanted)
    if found is None:
        raise UserError(f"{folder} is incomplete", "the same command again")
    return found


def own_folder(wanted: Repository, commit: str) -> Path:
    """The folder of a download of this commit, whether or not it exists."""
    return _root() / wanted.repo / commit


def manifest(folder: Path) -> list[HubFile] | None:
    """The files listed in `folder`'s files.json; None if it is missing or can't be read."""
    try:
        return [HubFile(**entry) for entry in json.loads((folder / MANIFEST).read_text())]
    except (OSError, ValueError, TypeError):
        return None


def damaged(folder: Path) -> list[Path] | None:
    """The files of `folder` that are missing or differ from files.json; None without a readable files.json."""
    listed = manifest(folder)
    if listed is None:
        return _damaged_in_cache(folder)
    bad = []
    with progress(len(listed), f"checking the sums in {folder}", "file") as bar:
        for file in listed:
            if not (folder / file.path).is_file() or not file.matches(folder / file.path):
                bad.append(folder / file.path)
            bar.update()
    return bad


def split_of(path: str, splits: tuple[str, ...]) -> str | None:
    """Which split a parquet file holds: train-00000-of-00001.parquet, train.parquet or train/0000.parquet."""
    *folders, name = path.split("/")
    if not name.endswith(".parquet"):
        return None
    for split in splits:
        if re.match(rf"{re.escape(split)}[-._]", name):
            return split
    return next((split for split in splits if folders and folders[-1] == split), None)


def split_files(folder: Path, splits: tuple[str, ...]) -> dict[str, list[Path]]:
    """The parquet files of each split anywhere below `folder`, in order of their paths."""
    paths = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*.parquet"))]
    return _by_split(folder, paths, splits)


def _by_split(folder: Path, paths: list[str], splits: tuple[str, ...]) -> dict[str, list[Path]]:
    return {split: [folder / path for path in paths if split_of(path, splits) == split] for split in splits}


def incomplete(files: list[Path]) -> str | None:
    """A missing file that the others' names (train-00001-of-00003) imply; None: no file is missing."""
    found = [match for file in files if (match := re.search(r"-(\d+)-of-(\d+)", file.name))]
    if not found:
        return None
    number, count = found[0].groups()
    there = {int(match[1]) for match in found}
    gone = next((other for other in range(int(count)) if other not in there), None)
    return None if gone is None else found[0].string.replace(number, f"{gone:0{len(number)}d}", 1)


def readable(size: float) -> str:
    """A number of bytes in readable form: 144 MB, 18.5 GB."""
    if size < 1e6:
        return f"{size / 1e3:.0f} kB"
    return f"{size / 1e6:.0f} MB" if size < 1e9 else f"{size / 1e9:.1f} GB"


def _root() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "fcl-bench"


def _downloads(wanted: Repository) -> list[Path]:
    """The folders of earlier downloads that may be used: the pinned commit's, or all with the newest first."""
    if wanted.revision is not None:
        # For a branch name this folder does not exist: only the hub knows which commit it names now.
        return [own_folder(wanted, wanted.revision)]
    folders = [found.parent for found in (_root() / wanted.repo).glob(f"*/{MANIFEST}")]
    return sorted(folders, key=lambda folder: (folder / MANIFEST).stat().st_mtime, reverse=True)


def _whole(folder: Path, wanted: Repository) -> Snapshot | None:
    listed = manifest(folder)
    if listed is None or not all(_has_size(folder, file) for file in listed):
        return None
    files = _by_split(folder, [file.path for file in listed], wanted.splits)
    return Snapshot(folder, folder.name, files) if all(files.values()) else None


def _in_hub_cache(wanted: Repository) -> Snapshot | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = snapshot_download(
            wanted.repo, repo_type="dataset", revision=wanted.revision, local_files_only=True, allow_patterns=[]
        )
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    folder = Path(cached)
    files = split_files(folder, wanted.splits)
    if not all(files.values()) or any(incomplete(found) for found in files.values()):
        return None
    return Snapshot(folder, folder.name, files)


def _damaged_in_cache(folder: Path) -> list[Path] | None:
    """Like `damaged`, for the hub's own cache, whose blobs are named by their checksums."""
    blobs = {file: file.resolve().name for file in sorted(folder.rglob("*.parquet"))}
    if not blobs or not all(re.fullmatch(r"[0-9a-f]{64}", name) for name in blobs.values()):
        return None
    return [file for file, name in blobs.items() if file_checksum(file, hashlib.sha256()) != name]


def _listing(wanted: Repository) -> tuple[str, list[HubFile]]:
    """The commit that the revision names now, and the splits' files in it."""
    from huggingface_hub import HfApi

    if why := unreachable():
        raise not_here(wanted, f"could not be fetched from the hub: {why}")
    try:
        info: Any = HfApi().repo_info(
            wanted.repo, repo_type="dataset", revision=wanted.revision, files_metadata=True, timeout=30
        )
    except Exception as error:  # the hub's client raises its own kinds, its HTTP library's and the system's
        raise not_here(wanted, f"could not be fetched from the hub: {first_line(error)}") from error
    entries = [entry for entry in info.siblings or [] if split_of(entry.rfilename, wanted.splits)]
    missing = set(wanted.splits) - {split_of(entry.rfilename, wanted.splits) for entry in entries}
    if missing:
        raise UserError(
            f"data={wanted.data}: {wanted.repo} has no parquet files of the split {min(missing)}",
            f"files such as data/{min(missing)}-00000-of-00001.parquet, or data.path=FOLDER",
        )
    files = [
        HubFile(entry.rfilename, entry.size, entry.lfs.sha256 if entry.lfs else None, entry.blob_id)
        for entry in entries
    ]
    return info.sha, files


def not_here(wanted: Repository, why: str) -> UserError:
    """The error message if the files are not on this machine: which files to put where."""
    at = f", revision {wanted.revision[:8]}" if wanted.revision else ""
    return UserError(
        f"data={wanted.data}: {wanted.repo} {why}",
        f"{wanted.place} with that repository's {' and '.join(f'{split}-*.parquet' for split in wanted.splits)}{at};"
        f" fcl-bench-data prepare {wanted.data} downloads them where there is a network",
    )


def _download_file(wanted: Repository, commit: str, folder: Path, file: HubFile) -> None:
    """Download one file and verify it. The hub's client resumes a broken connection, and keeps only a whole file."""
    from huggingface_hub import hf_hub_download

    with _quiet_unless_terminal():
        try:
            path = Path(
                hf_hub_download(
                    wanted.repo,
                    file.path,
                    repo_type="dataset",
                    revision=commit,
                    local_dir=folder,
                    force_download=True,  # the client takes a file that it downloaded before for whole
                )
            )
        except Exception as error:  # see _listing
            raise UserError(
                f"data={wanted.data}: the download of {file.path} broke off: {first_line(error)}",
                "the same command goes on with this file",
            ) from error
    if not file.matches(path):
        path.unlink()
        raise UserError(
            f"data={wanted.data}: {file.path} arrived damaged, its checksum is wrong; it has been removed",
            "the same command downloads it again",
        )


@contextmanager
def _quiet_unless_terminal() -> Iterator[None]:
    """A context in which the hub's client shows a progress bar only on a terminal."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _has_size(folder: Path, file: HubFile) -> bool:
    target = folder / file.path
    return target.is_file() and target.stat().st_size == file.size
