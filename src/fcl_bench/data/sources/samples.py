"""Unlabelled samples in memory or in files, and a subset of a side's samples, as one side of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fcl_bench.data.images.stored import ArrayImages, FileImages, Images
from fcl_bench.data.sources.array_files import native_floats
from fcl_bench.data.sources.base import Split
from fcl_bench.errors import UserError
from fcl_bench.files import content_hash

_FORMS = "uint8 images (n, h, w) or (n, h, w, 3), PIL images, paths of image files, or features (n, d)"


class OpenImages:
    """Images that are already open."""

    fingerprint = ""  # nothing derived from them is cached

    def __init__(self, images: Sequence[Image.Image]) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Image.Image:
        return self._images[index]

    def describe(self, index: int) -> str:
        return f"image {index}"


def samples_of(inputs: Any) -> Split:
    """Images or features in whatever form they are; the labels are all -1.

    Raises:
        UserError: they are none of these.
    """
    if isinstance(inputs, Split):
        return inputs
    found = _inputs(inputs)
    return Split(np.full(len(found), -1, dtype=np.int64), found, "")


def _inputs(inputs: Any) -> Images | np.ndarray:
    if hasattr(inputs, "describe") and hasattr(inputs, "__getitem__"):
        return inputs
    if isinstance(inputs, list | tuple) and inputs:
        if all(isinstance(entry, Image.Image) for entry in inputs):
            return OpenImages(inputs)
        if all(isinstance(entry, str | Path) for entry in inputs):
            return FileImages(Path("/"), [Path(entry).expanduser().absolute() for entry in inputs])
    array = inputs.detach().cpu().numpy() if hasattr(inputs, "detach") else np.asarray(inputs)
    if array.ndim == 2 and array.dtype.kind in "fiu":
        return native_floats(array)
    if array.dtype == np.uint8 and (array.ndim == 3 or (array.ndim == 4 and array.shape[3] == 3)):
        return ArrayImages(array)
    if array.dtype == np.uint8 and array.ndim == 4 and array.shape[1] == 3:
        return ArrayImages(array.transpose(0, 2, 3, 1))
    raise UserError(f"inputs of shape {array.shape} and type {array.dtype} are neither images nor features", _FORMS)


class ChosenImages:
    """The images `rows` (n,) of others, decoded on access."""

    fingerprint = ""  # `rows_of` gives the split one

    def __init__(self, images: Images, rows: np.ndarray) -> None:
        self._images, self._rows = images, rows

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
