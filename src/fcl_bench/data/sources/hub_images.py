"""Image data sets of the Hugging Face hub, or local copies of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fcl_bench.config import knob
from fcl_bench.data.sources.base import About, Dataset, existing_path
from fcl_bench.data.sources.hub import Repository, Snapshot, fetch, incomplete, split_files
from fcl_bench.data.sources.hub_tables import class_labels, read_table
from fcl_bench.data.sources.image_folder import ImageFolder, class_names
from fcl_bench.data.sources.image_source import ImageSource
from fcl_bench.data.sources.sides import Side, TableSide
from fcl_bench.errors import UserError

log = logging.getLogger(__name__)


@dataclass
class HubImages(ImageSource):
    """An image data set of the Hugging Face hub at a pinned revision, or a local folder in the same layout.

    Args:
        name: what tables call it.
        repo: hub name ("uoft-cs/cifar100").
        revision: commit of the hub repository; None: whatever its main branch holds, which the log names.
        image_column, label_column: the columns to read.
        path: a local folder to read instead: the repository's parquet files at any depth (train-*.parquet,
            test-*.parquet), or images in train/<class>/* and test/<class>/*.
        classes, per_class, test_per_class: see `ImageSource`.
        train_split, test_split: what the repository calls the two sides. No part of a run's identity: the hash of the
            images' content is.
        about: what is known beforehand.
    """

    name: str
    repo: str
    revision: str | None
    image_column: str
    label_column: str
    train_split: str = knob("train", identity=False)
    test_split: str = knob("test", identity=False)
    about: About = knob(About, identity=False)

    #: Where a user can put the files instead; no knob.
    place = Repository.place

    def load(self) -> Dataset:
        if (folders := self._class_folders()) is not None:
            return folders.load()
        return self._assembled(self.sides(), self.origin())

    def facts(self) -> About:
        return self.about

    def repositories(self) -> list[Repository]:
        if self.path is not None:
            return []
        splits = tuple(dict.fromkeys((self.train_split, self.test_split)))
        return [Repository(self.name, self.repo, self.revision, splits, self.place)]

    def sides(self) -> Mapping[str, Side]:
        """All of "train" and "test", as the source has them."""
        return {side: self._labelled(side) for side in ("train", "test")}

    def origin(self) -> str:
        """Which files are read."""
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
        return read_table(files, self.image_column, needed, self._key, side)

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
        # A copy that calls its test side "test" will do where the hub's is called "valid".
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
        """The local folder as images in class folders; None if it holds parquet files, or neither."""
        if self.path is None:
            return None
        folder = self._folder()
        if any(folder.rglob("*.parquet")) or not class_names(folder / "train"):
            return None
        return ImageFolder(
            self.name,
            path=self.path,
            classes=self.classes,
            per_class=self.per_class,
            test_per_class=self.test_per_class,
        )
