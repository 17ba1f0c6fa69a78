"""ImageNet-R: 30,000 renditions of 200 ImageNet classes, published without a test set and split 80/20 here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fcl_bench.data.sources.held_out import held_out, read_index, write_index
from fcl_bench.data.sources.hub_images import HubImages
from fcl_bench.data.sources.image_folder import class_names, labelled_files
from fcl_bench.data.sources.image_source import Side, TableSide
from fcl_bench.errors import UserError
from fcl_bench.files import content_hash, file_checksum

log = logging.getLogger(__name__)

#: The index file that `fcl-bench-data prepare` leaves beside the images.
INDEX = "imagenet_r-split.csv"


@dataclass
class ImageNetR(HubImages):
    """ImageNet-R as a training and a test set, 80/20 in each class, by `held_out`'s rule or the index file beside it.

    The label is the rank of the class's WordNet number (`wnid`).

    Args:
        path: a local folder to read instead: the hub's parquet files, the released folder (<wnid>/*), or images that
            are already split (train/<class>/*, test/<class>/*).
        label_column: holds WordNet numbers.
        train_split, test_split: both are the hub's one split.
    """

    def origin(self) -> str:
        return "local files as released" if self._is_released() else super().origin()

    def sides(self) -> dict[str, Side]:
        whole, classes, digests = self._whole()
        index = self._index_path()
        test = read_index(index, classes, whole.labels, digests) if index.exists() else held_out(whole.labels, digests)
        return {side: whole.taken(np.flatnonzero(chosen)) for side, chosen in (("train", ~test), ("test", test))}

    def prepare(self) -> None:
        if self._class_folders() is None and not (index := self._index_path()).exists():
            whole, classes, digests = self._whole()
            write_index(index, classes, whole.labels, digests, held_out(whole.labels, digests))
            log.info("data %s: which image is on which side is in %s", self.name, index)

    def _index_path(self) -> Path:
        return (self._snapshot.folder if self.path is None else self._folder()) / INDEX

    def _is_released(self) -> bool:
        return self.path is not None and not any(self._folder().rglob("*.parquet"))

    def _whole(self) -> tuple[Side, list[str], list[str]]:
        """All images with the ranks of their classes as labels, the classes in order, and the images' hashes."""
        return self._released() if self._is_released() else self._table_of_all()

    def _table_of_all(self) -> tuple[Side, list[str], list[str]]:
        table = self._table("test", self.label_column)
        names = table.with_format("numpy")[self.label_column][:]
        if any(not isinstance(name, str) for name in names):
            raise UserError(
                f"{self._key}: column {self.label_column} of {self.test_split} holds no names",
                "WordNet numbers such as n01443537",
            )
        classes, labels = np.unique(np.asarray(names), return_inverse=True)
        whole = TableSide(labels.astype(np.int64), table, self.image_column)
        return whole, list(map(str, classes)), list(self._hashes(table))

    def _hashes(self, table: Any) -> Iterator[str]:
        for batch in table.select_columns([self.image_column]).with_format("arrow").iter(batch_size=1000):
            for value in batch.column(self.image_column).combine_chunks().field("bytes"):
                yield content_hash(value.as_buffer() if value.is_valid else b"").hexdigest()

    def _released(self) -> tuple[Side, list[str], list[str]]:
        folder = self._folder()
        classes = class_names(folder)
        if not classes:
            raise UserError(
                f"data.path={folder} has no <wnid>/ folders and no parquet files",
                f"the released folder, one of the files {self._wanted_layout().removeprefix('a folder with ')},"
                " or train/<class>/* and test/<class>/*",
            )
        whole = labelled_files(folder, {name: number for number, name in enumerate(classes)}, folder)
        return whole, classes, list(map(file_checksum, whole.files))
