"""Image data sets of the Hugging Face hub, or local copies of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.sources.base import About, Dataset, existing_path
from fcl_bench.data.sources.hub import Repository, Snapshot, fetch, incomplete, split_files
from fcl_bench.data.sources.image_source import ImageFolder, ImageSource, Side, TableSide, class_names
from fcl_bench.errors import UserError, choices, first_line
from fcl_bench.files import special

log = logging.getLogger(__name__)

#: Bytes of parquet that are read in a few seconds; for more, a progress bar is shown.
_QUICK = 1 << 30


@dataclass
class HubImages(ImageSource):
    """An image data set of the Hugging Face hub at a pinned revision, or a local folder in the same layout."""

    name: str = knob(filled=True, words="a name for tables")
    repo: str = knob(filled=True, words="owner/name")
    revision: str | None = knob()
    image_column: str = knob(filled=True, words="a column of the files")
    label_column: str = knob(filled=True, words="a column of the files")
    train_split: str = knob("train", identity=False)
    test_split: str = knob("test", identity=False)
    about: About = knob(About, identity=False)

    #: Where a user can put the files instead; not a knob.
    place = Repository.place

    def load(self) -> Dataset:
        if (folders := self._class_folders()) is not None:
            return folders.load()
        sides = self.sides()
        names = label_names(sides["train"].table, self.label_column) if isinstance(sides["train"], TableSide) else None
        return replace(self._assembled(sides, self.origin()), class_names=tuple(names or ()))

    def repositories(self) -> list[Repository]:
        if self.path is not None:
            return []
        splits = tuple(dict.fromkeys((self.train_split, self.test_split)))
        return [Repository(self.name, self.repo, self.revision, splits, self.place)]

    def sides(self) -> Mapping[str, Side]:
        """The sides "train" and "test", complete, as the source has them."""
        return {side: self._labelled(side) for side in ("train", "test")}

    def origin(self) -> str:
        """The files that are read, for messages and records."""
        if self.path is not None:
            return f"local files in the layout of {self.repo}"
        return f"{self.repo} at {self._snapshot.commit}"

    def _labelled(self, side: str) -> TableSide:
        """One side's table and its labels."""
        table = self._table(side, self.label_column)
        return TableSide(class_labels(table, self.label_column, self._key, side), table, self.image_column)

    def _table(self, side: str, *needed: str) -> Any:
        """One side's table with the columns that are needed, its images not decoded."""
        split = self.train_split if side == "train" else self.test_split
        files = self._local_files(side, split) if self.path is not None else self._snapshot.files[split]
        return _read_table(files, self.image_column, needed, self._key, side)

    @cached_property
    def _snapshot(self) -> Snapshot:
        """The hub's files on this machine, downloaded if need be."""
        [wanted] = self.repositories()
        snapshot = fetch(wanted)
        log.info("data %s: %s at %s, in %s", self.name, self.repo, snapshot.commit[:8], snapshot.folder)
        return snapshot

    def _folder(self) -> Path:
        return existing_path(self.path, self.name, self._wanted_layout())

    def _wanted_layout(self) -> str:
        files = " and ".join(f"data/{split}-*.parquet" for split in dict.fromkeys((self.train_split, self.test_split)))
        return f"a folder with {files}"

    def _local_files(self, side: str, split: str) -> list[Path]:
        folder = self._folder()
        # A copy with a side named "test" is accepted if the hub calls it "valid".
        by_split = split_files(folder, (split, side))
        files = by_split[split] or by_split[side]
        missing = incomplete(files)
        if not files or missing:
            reason = f"{missing} is missing" if missing else f"no {split}-*.parquet at any depth"
            raise UserError(
                f"data.path={folder} has no readable {side} split: {reason}",
                f"the parquet layout of {self.repo}: {self._wanted_layout().removeprefix('a folder with ')};"
                " or images in train/<class>/* and test/<class>/*",
            )
        return files

    def _class_folders(self) -> ImageFolder | None:
        """The local folder read as class folders of images; None if it holds parquet files, or neither."""
        if self.path is None:
            return None
        folder = self._folder()
        if any(folder.rglob("*.parquet")) or not class_names(folder / "train"):
            return None
        return ImageFolder(
            self.name,
            path=self.path,
            classes=self.classes,
            skip_classes=self.skip_classes,
            per_class=self.per_class,
            test_per_class=self.test_per_class,
        )


def _read_table(files: list[Path], image_column: str, needed: tuple[str, ...], key: str, side: str) -> Any:
    """The parquet files, in order, as one `datasets.Dataset` whose images are left as bytes.

    Raises:
        UserError: they can't be read, or the image column or a `needed` one is not there.
    """
    import datasets

    for file in files:
        if found := special(file):
            raise UserError(f"{key}: {file} is {found}", "a parquet file, or remove it")
    if sum(file.stat().st_size for file in files) < _QUICK:
        datasets.disable_progress_bars()
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs what it then raises, and the error is reported below
    try:
        table: Any = datasets.load_dataset("parquet", data_files={"train": list(map(str, files))}, split="train")
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        names = files[0].name if len(files) == 1 else f"one of {files[0].name} to {files[-1].name}"
        cause = error.__cause__ or error
        raise UserError(
            f"{key}: {names} in {files[0].parent} is not a readable parquet file: {first_line(cause)}",
            "fcl-bench-data prepare gets damaged files of the hub again; remove and replace others",
        ) from error
    finally:
        datasets.enable_progress_bars()
        datasets.logging.set_verbosity(level)
    for column in (image_column, *needed):
        if column not in table.column_names:
            raise UserError(f"{key}: no column {column} in {side}", choices(table.column_names, column))
    kind = table.features[image_column]
    # The other columns that it could cast, lists of numbers, are pixels without an encoding.
    if not isinstance(kind, datasets.Image) and not _holds_bytes(kind):
        raise UserError(
            f"{key}: column {image_column} of {side} holds no encoded images", "bytes of PNG, JPEG and the like"
        )
    return table.cast_column(image_column, datasets.Image(decode=False))


def _holds_bytes(kind: Any) -> bool:
    """Whether a column's type is what `datasets` takes for encoded images: bytes, paths, or both by name."""
    if isinstance(kind, dict):
        return "bytes" in kind
    return str(getattr(kind, "dtype", "")) in ("string", "large_string", "binary", "large_binary", "null")


def class_labels(table: Any, column: str, key: str, side: str) -> np.ndarray:
    """The class labels (n,) in `column`. Raises a `UserError` if they are not non-negative integers."""
    labels = np.asarray(table.with_format("numpy")[column][:])
    if labels.dtype.kind not in "iu" or (len(labels) and labels.min() < 0):
        raise UserError(f"{key}: column {column} of {side} is not a class label", "non-negative integers")
    return labels.astype(np.int64)


def label_names(table: Any, column: str) -> list[str] | None:
    """The names of the labels in `column`, in the labels' order; None where the table holds none."""
    names = getattr(table.features[column], "names", None)
    return None if names is None else [str(name) for name in names]
