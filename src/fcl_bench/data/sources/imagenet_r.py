"""ImageNet-R: 30,000 renditions of 200 ImageNet classes, published without a test set and split 80/20 here.

The cut depends on the images' bytes alone. In each class the distinct images are sorted by their hashes (BLAKE2b, 128
bits, of the encoded file), and the first ones are test images, until these are a fifth of the class: n/5 rounded to the
nearest number, at least one. Equal images of a class stay together. Neither a seed nor the order of the files matters,
so a parquet file and a folder with the same image files give the same cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fcl_bench.data.sources.hub_images import HubImages, image_hashes
from fcl_bench.data.sources.image_source import Side, TableSide, class_names, labelled_files
from fcl_bench.errors import UserError
from fcl_bench.files import file_checksum

#: One of this many samples of a class is a test sample.
_SHARE = 5


@dataclass
class ImageNetR(HubImages):
    """ImageNet-R as a training and a test set, 80/20 in each class, by `held_out`'s rule.

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
        whole, digests = self._released() if self._is_released() else self._table_of_all()
        test = held_out(whole.labels, digests)
        return {side: whole.taken(np.flatnonzero(chosen)) for side, chosen in (("train", ~test), ("test", test))}

    def _is_released(self) -> bool:
        return self.path is not None and not any(self._folder().rglob("*.parquet"))

    def _table_of_all(self) -> tuple[Side, list[str]]:
        """All images with the ranks of their classes as labels, and the images' hashes."""
        table = self._table("test", self.label_column)
        names = table.with_format("numpy")[self.label_column][:]
        if any(not isinstance(name, str) for name in names):
            raise UserError(
                f"{self._key}: column {self.label_column} of {self.test_split} holds no names",
                "WordNet numbers such as n01443537",
            )
        labels = np.unique(np.asarray(names), return_inverse=True)[1]
        whole = TableSide(labels.astype(np.int64), table, self.image_column)
        return whole, list(image_hashes(table, self.image_column))

    def _released(self) -> tuple[Side, list[str]]:
        folder = self._folder()
        classes = class_names(folder)
        if not classes:
            raise UserError(
                f"data.path={folder} has no <wnid>/ folders and no parquet files",
                f"the released folder, one of the files {self._wanted_files()}, or train/<class>/* and test/<class>/*",
            )
        whole = labelled_files(folder, {name: number for number, name in enumerate(classes)}, folder)
        return whole, list(map(file_checksum, whole.files))


def held_out(labels: np.ndarray, digests: list[str]) -> np.ndarray:
    """Which samples are test samples (n,) bool, given their classes (n,) and the hashes of their images."""
    names = np.asarray(digests)
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = members[np.argsort(names[members], kind="stable")]
        wanted = max(1, (2 * len(members) + _SHARE) // (2 * _SHARE))
        last = names[members[wanted - 1]]
        test[members[names[members] <= last]] = True
    return test
