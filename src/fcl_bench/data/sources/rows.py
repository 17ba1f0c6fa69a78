"""A subset of a split's samples as a split: the part of a data set that a node has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from PIL import Image

from fcl_bench.data.images.stored import ArrayImages, Images
from fcl_bench.data.sources.base import Split
from fcl_bench.files import content_hash


class ChosenImages:
    """The images `rows` (n,) of others, decoded on access."""

    def __init__(self, images: Images, rows: np.ndarray) -> None:
        self._images, self._rows = images, rows
        digest = content_hash(images.fingerprint.encode())
        digest.update(np.ascontiguousarray(rows).data)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Image.Image:
        return self._images[int(self._rows[index])]

    def describe(self, index: int) -> str:
        return self._images.describe(int(self._rows[index]))


def rows_of(split: Split, rows: np.ndarray) -> Split:
    """The samples `rows` (m,) of a split, in this order; no other sample's values are read."""
    if isinstance(split.inputs, np.ndarray):
        inputs: Images | np.ndarray = split.inputs[rows]
    elif isinstance(split.inputs, ArrayImages):
        inputs = ArrayImages(split.inputs.pixels[rows])
    else:
        inputs = ChosenImages(split.inputs, rows)
    digest = content_hash(split.fingerprint.encode())
    digest.update(np.ascontiguousarray(rows).data)
    domains = None if split.domains is None else split.domains[rows]
    return replace(split, labels=split.labels[rows], inputs=inputs, fingerprint=digest.hexdigest(), domains=domains)
