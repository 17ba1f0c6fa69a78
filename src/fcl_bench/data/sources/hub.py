"""Parquet files of a data set on the Hugging Face hub: in its cache here, or downloaded; and sources that read them.

The cache names a file's content by its checksum, so that it can be verified at any time, without network too.
"""

from __future__ import annotations

import hashlib
import logging
import re
import socket
import tarfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from rich.filesize import decimal

from fcl_bench.config import knob
from fcl_bench.data.sources.base import About, Source, existing_path
from fcl_bench.errors import UserError, choices, first_line
from fcl_bench.files import file_checksum, special, writable
from fcl_bench.tracking.console import progress

log = logging.getLogger(__name__)

#: Bytes of parquet that are read in a few seconds; for more, a progress bar is shown.
_QUICK = 1 << 30
#: Endings of tables' files -> what `datasets` calls their format, and how it reads them.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", {"keep_default_na": False, "na_values": [""]}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".tar": ("webdataset", {}),
}
#: What `datasets` lets through where a file is damaged or of another kind, besides errors of its own.
_UNREADABLE = (OSError, ValueError, LookupError, NotImplementedError, tarfile.TarError)
#: Seconds that the hub has to accept a connection; its own client tries for most of a minute.
_PATIENCE = 5.0


@dataclass(frozen=True)
class Repository:
    """The files wanted from one repository of the hub.

    Attributes:
        repo: hub name ("uoft-cs/cifar100").
        revision: commit, branch or tag; None: whatever the main branch holds.
        place: where a user can put the files instead, as `data.path` or below it.

    Raises:
        UserError: the revision is not a valid git name. The cache uses it in a path, and would follow "/dev/zero".
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
class Snapshot:
    """A repository's files on this machine, in a folder that has the commit's name.

    Attributes:
        files: the files of each split, sorted by name.
    """

    folder: Path
    files: dict[str, list[Path]]


def unreachable() -> str:
    """Why the hub cannot be reached; "" if it answers, or if there is a proxy, which may reach it."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    url = urlsplit(constants.ENDPOINT)
    if url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(url.hostname or ""):
        return ""
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        socket.create_connection((url.hostname or "", port), timeout=_PATIENCE).close()
    except OSError as error:
        return f"{url.netloc} does not answer: {error.strerror or error}"
    return ""


@contextmanager
def cache_unless_reachable() -> Iterator[str]:
    """A context in which the hub's client uses only its cache if the hub cannot be reached; yields the reason."""
    from huggingface_hub import constants

    why, before = unreachable(), constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or bool(why)
    try:
        yield why
    finally:
        constants.HF_HUB_OFFLINE = before


def locate(wanted: Repository) -> Snapshot | None:
    """The files on this machine, without any use of the network; None if any is missing."""
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
    return Snapshot(folder, files)


def download(wanted: Repository) -> Snapshot:
    """Download the files that are missing, and verify each one's checksum.

    Raises:
        UserError: no network, no such repository, no disk space, or a file that arrived damaged (it is removed).
    """
    from huggingface_hub import constants, hf_hub_download

    files = _listing(wanted)
    size, cache = sum(file.size for file in files), writable("HF_HOME", Path(constants.HF_HUB_CACHE))
    log.info("data %s: downloading %s from the hub to %s", wanted.data, decimal(size), cache)
    for file in files:
        # The hub's client resumes a broken download, keeps only a whole file, and takes one that is here already.
        try:
            path = Path(hf_hub_download(wanted.repo, file.rfilename, repo_type="dataset", revision=wanted.revision))
        except Exception as error:  # see _listing
            raise UserError(
                f"data={wanted.data}: the download of {file.rfilename} broke off: {first_line(error)}",
                "the same command goes on with this file",
            ) from error
        if not _has_checksum(path, file.lfs.sha256 if file.lfs else file.blob_id):
            remove_file(path)
            raise UserError(
                f"data={wanted.data}: {file.rfilename} arrived damaged, its checksum is wrong; it has been removed",
                "the same command downloads it again",
            )
    found = locate(wanted)
    if found is None:
        raise UserError(f"data={wanted.data}: the download is incomplete", "the same command again")
    return found


def damaged(folder: Path) -> list[Path] | None:
    """The parquet files below `folder` whose content is gone or changed; None where no checksums are known.

    In the hub's cache, and in a copy of one with its links, a file is a link to a blob whose name is its checksum.
    """
    files = sorted(folder.rglob("*.parquet"))
    if not files or not all(re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", file.resolve().name) for file in files):
        return None
    bad = []
    with progress(len(files), f"checking the sums in {folder}", "file") as bar:
        for file in files:
            if not _has_checksum(file, file.resolve().name):
                bad.append(file)
            bar.update()
    return bad


def remove_file(file: Path) -> None:
    """Remove a file of the hub's cache: its link and its content."""
    file.resolve().unlink(missing_ok=True)
    file.unlink(missing_ok=True)


def split_of(path: str, splits: tuple[str, ...], endings: tuple[str, ...] = (".parquet",)) -> str | None:
    """Which split a file holds: train-00000-of-00001.parquet, train.parquet or train/0000.parquet.

    A split `plus/train` is in the files of the folder plus only.
    """
    if not path.endswith(endings):
        return None
    for split in splits:
        if re.search(rf"(^|/){re.escape(split)}[-._][^/]*$", path):
            return split
    return next((split for split in splits if re.search(rf"(^|/){re.escape(split)}/[^/]*$", path)), None)


def split_files(
    folder: Path, splits: tuple[str, ...], endings: tuple[str, ...] = (".parquet",)
) -> dict[str, list[Path]]:
    """The files of each split anywhere below `folder`, in order of their paths."""
    files = [file for ending in endings for file in sorted(folder.rglob(f"*{ending}")) if file.exists()]
    which = [split_of(file.relative_to(folder).as_posix(), splits, endings) for file in files]
    return {split: [file for file, own in zip(files, which, strict=True) if own == split] for split in splits}


def incomplete(files: list[Path]) -> str | None:
    """A missing file that the others' names (train-00001-of-00003) imply; None: no file is missing."""
    found = [match for file in files if (match := re.search(r"-(\d+)-of-(\d+)", file.name))]
    if not found:
        return None
    number, count = found[0].groups()
    there = {int(match[1]) for match in found}
    gone = next((other for other in range(int(count)) if other not in there), None)
    return None if gone is None else found[0].string.replace(number, f"{gone:0{len(number)}d}", 1)


def not_here(wanted: Repository, why: str) -> UserError:
    """The error message if the files are not on this machine: which files to put where."""
    at = f", revision {wanted.revision[:8]}" if wanted.revision else ""
    return UserError(
        f"data={wanted.data}: {wanted.repo} {why}",
        f"{wanted.place} with that repository's {' and '.join(f'{split}-*.parquet' for split in wanted.splits)}{at};"
        f" fcl-bench-data prepare {wanted.data} downloads them where there is a network",
    )


def _listing(wanted: Repository) -> list[Any]:
    """The hub's entries of the splits' files."""
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
    return entries


def _has_checksum(file: Path, checksum: str) -> bool:
    """Whether the file has this SHA-256 hash or, if it is one of the small files that the hub keeps in git, git's."""
    if not file.is_file():
        return False
    git = hashlib.sha1(f"blob {file.stat().st_size}\0".encode(), usedforsecurity=False)
    return file_checksum(file, hashlib.sha256() if len(checksum) == 64 else git) == checksum


@dataclass
class HubFiles(Source):
    """A repository of the Hugging Face hub at a pinned revision, or a local folder in the same layout."""

    name: str = knob(filled=True, words="a name for tables")
    repo: str = knob(filled=True, words="owner/name")
    revision: str | None = knob()
    _: KW_ONLY
    path: str | None = knob(None, identity=False)
    train_split: str = knob("train", identity=False)
    test_split: str = knob("test", identity=False)
    about: About = knob(About, identity=False)

    #: Where a user can put the files instead, and what else may be there; no knobs.
    place = Repository.place
    other_layout = ""
    #: The endings of local files that it reads; no knob.
    endings: ClassVar[tuple[str, ...]] = (".parquet",)

    def repositories(self) -> list[Repository]:
        if self.path is not None:
            return []
        splits = tuple(dict.fromkeys((self.train_split, self.test_split)))
        return [Repository(self.name, self.repo, self.revision, splits, self.place)]

    def origin(self) -> str:
        """The files that are read, for messages and records."""
        if self.path is not None:
            return f"local files in the layout of {self.repo}"
        return f"{self.repo} at {self._snapshot.folder.name}"

    def table(self, side: str, *columns: str) -> Any:
        """One side as a `datasets.Dataset`. Raises a `UserError` if it can't be read or lacks one of the `columns`."""
        split = self.train_split if side == "train" else self.test_split
        files = self._local_files(side, split) if self.path is not None else self._snapshot.files[split]
        return read_table(files, columns, self._key, side)

    @cached_property
    def _snapshot(self) -> Snapshot:
        """The hub's files on this machine, downloaded if need be."""
        [wanted] = self.repositories()
        snapshot = locate(wanted) or download(wanted)
        log.info("data %s: %s at %s, in %s", self.name, self.repo, snapshot.folder.name[:8], snapshot.folder)
        return snapshot

    def _folder(self) -> Path:
        return existing_path(self.path, self.name, self._wanted_layout())

    def _wanted_layout(self) -> str:
        return f"a folder with {self._wanted_files()}"

    def _wanted_files(self) -> str:
        splits = dict.fromkeys((self.train_split, self.test_split))
        return " and ".join(f"{'data/' if self.repo else ''}{self._pattern(split)}" for split in splits)

    def _pattern(self, split: str) -> str:
        return " or ".join(f"{split}-*{ending}" for ending in self.endings)

    def _local_files(self, side: str, split: str) -> list[Path]:
        folder = self._folder()
        # A copy with a side named "test" is accepted if the hub calls it "valid".
        by_split = split_files(folder, (split, side), self.endings)
        files = by_split[split] or by_split[side]
        files = [file for file in files if file.suffix == files[0].suffix]
        missing = incomplete(files)
        if not files or missing:
            reason = f"{missing} is missing" if missing else f"no {self._pattern(split)} at any depth"
            layout = f"the parquet layout of {self.repo}: " if self.repo else ""
            raise UserError(
                f"data.path={folder} has no readable {side} split: {reason}",
                f"{layout}{self._wanted_files()}{self.other_layout}",
            )
        return files


def read_table(files: list[Path], columns: tuple[str, ...], key: str, side: str) -> Any:
    """Files of one format as one `datasets.Dataset`; raises a `UserError` if they can't be, or lack a column."""
    import datasets

    for file in files:
        if found := special(file):
            raise UserError(f"{key}: {file} is {found}", "a parquet file, or remove it")
    if sum(file.stat().st_size for file in files) < _QUICK:
        datasets.disable_progress_bars()
    kind, options = FORMATS[files[0].suffix]
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs what it then raises, and the error is reported below
    try:
        table: Any = datasets.load_dataset(kind, data_files={"train": list(map(str, files))}, split="train", **options)
    except (*_UNREADABLE, datasets.exceptions.DatasetsError) as error:
        names = files[0].name if len(files) == 1 else f"one of {files[0].name} to {files[-1].name}"
        cause = error.__cause__ or error
        raise UserError(
            f"{key}: {names} in {files[0].parent} is not a readable {kind} file: {first_line(cause)}",
            "an undamaged file, its text in UTF-8; fcl-bench-data prepare gets those of the hub again",
        ) from error
    finally:
        datasets.enable_progress_bars()
        datasets.logging.set_verbosity(level)
    for column in columns:
        if column not in table.column_names:
            raise UserError(f"{key}: no column {column} in {side}", choices(table.column_names, column))
    return table


def label_names(table: Any, column: str) -> list[str] | None:
    """The names of the labels in `column`, in the labels' order; None where the table holds none."""
    names = getattr(table.features[column], "names", None)
    return None if names is None else [str(name) for name in names]
