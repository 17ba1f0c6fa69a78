"""Image data sets of the Hugging Face hub, or local copies of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.sources.base import Dataset
from fcl_bench.data.sources.hub import HubFiles, label_names
from fcl_bench.data.sources.image_source import ImageFolder, ImageSource, Side, TableSide, class_names
from fcl_bench.errors import UserError
from fcl_bench.files import content_hash


@dataclass
class HubImages(HubFiles, ImageSource):
    """An image data set of the Hugging Face hub at a pinned revision, or a local folder in the same layout."""

    image_column: str = knob(filled=True, words="a column of the files")
    label_column: str = knob(filled=True, words="a column of the files")

    other_layout = "; or images in train/<class>/* and test/<class>/*"

    def load(self) -> Dataset:
        if (folders := self._class_folders()) is not None:
            return folders.load()
        sides = self.sides()
        names = label_names(sides["train"].table, self.label_column) if isinstance(sides["train"], TableSide) else None
        return replace(self._assembled(sides, self.origin()), class_names=tuple(names or ()))

    def sides(self) -> Mapping[str, Side]:
        """The sides "train" and "test", complete, as the source has them."""
        return {side: self._labelled(side) for side in ("train", "test")}

    def _labelled(self, side: str) -> TableSide:
        """One side's table and its labels."""
        table = self._table(side, self.label_column)
        return TableSide(class_labels(table, self.label_column, self._key, side), table, self.image_column)

    def _table(self, side: str, *needed: str) -> Any:
        """One side's table with the columns that are needed, its images not decoded."""
        table = self.table(side, self.image_column, *needed)
        return undecoded(table, self.image_column, f"{self._key}: column {self.image_column} of {side}")

    def _class_folders(self) -> ImageFolder | None:
        """The local folder read as class folders of images; None if it holds parquet files, or neither."""
        if self.path is None:
            return None
        folder = self._folder()
        if any(folder.rglob("*.parquet")) or not class_names(folder / "train"):
            return None
        return ImageFolder(self.name, **{own.name: getattr(self, own.name) for own in fields(ImageSource)})


def undecoded(table: Any, column: str, where: str) -> Any:
    """The table with encoded images in `column`; raises a `UserError`, which calls it `where`, if it holds none."""
    import datasets

    kind = table.features[column]
    # The other columns that it could cast, lists of numbers, are pixels without an encoding.
    if not isinstance(kind, datasets.Image) and not _holds_bytes(kind):
        raise UserError(f"{where} holds no encoded images", "bytes of PNG, JPEG and the like")
    return table.cast_column(column, datasets.Image(decode=False))


def image_hashes(table: Any, column: str) -> Iterator[str]:
    """A hash of each image's bytes."""
    for batch in table.select_columns([column]).with_format("arrow").iter(batch_size=1000):
        for value in batch.column(column).combine_chunks().field("bytes"):
            yield content_hash(value.as_buffer() if value.is_valid else b"").hexdigest()


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
