"""Sequences of images that are decoded one at a time, each with a fingerprint of its content."""

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fcl_bench.errors import UserError, first_line
from fcl_bench.files import content_hash, file_checksum
from fcl_bench.tracking.console import progress

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})

#: These are tried first: trying the others takes longer than decoding a small WebP image.
_COMMON = ("PNG", "JPEG", "WEBP")
#: Pillow's forty other formats are off: a file's name does not tell its format, and EPS would run a program.
_FORMATS = (*_COMMON, "BMP", "GIF", "TIFF", "PPM")


class Images(ABC):
    """n images, decoded on access.

    Attributes:
        fingerprint: a hash of their content and order; "": nothing derived from them is cached.
    """

    fingerprint = ""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Image.Image: ...

    def decoded(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """The images at `indices`, read together where that is faster."""
        return (self[index] for index in indices)

    def describe(self, index: int) -> str:
        """The name of an image in messages."""
        return f"image {index}"


def _decode(source: Any, name: str) -> Image.Image:
    """Decode one image completely, to 8 bits per channel; a UserError names an image that can't be read."""
    try:
        with _open(source) as image:
            image.load()
            return _eight_bit(image)
    except Exception as error:  # whatever a decoder raises on foreign bytes
        unknown = isinstance(error, Image.UnidentifiedImageError)
        reason = f"not an image in {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}" if unknown else first_line(error)
        raise UserError(f"{name} cannot be read: {reason}", "replace or remove that image") from error


def _open(source: Any) -> Image.Image:
    try:
        return Image.open(source, formats=_COMMON)
    except Image.UnidentifiedImageError:
        return Image.open(source, formats=_FORMATS)


def _eight_bit(image: Image.Image) -> Image.Image:
    """16-bit grey scaled to 8 bits (Pillow's own conversion would clip it to white); other modes as they are."""
    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > 65535:
        raise ValueError(f"mode {image.mode} with values from {values.min()} to {values.max()} has no known white")
    return Image.fromarray(np.rint(values / 257).astype(np.uint8))


class ArrayImages(Images):
    """Images held as one uint8 array (n, height, width) or (n, height, width, 3)."""

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = np.ascontiguousarray(pixels, dtype=np.uint8)
        digest = content_hash(repr(self.pixels.shape).encode())
        digest.update(self.pixels.data)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index])


class EncodedImages(Images):
    """Images as the encoded bytes of a hub data set's column.

    Args:
        column: one of its columns, an image that is not decoded.
        rows: the ascending rows that are the images; None: all.
    """

    def __init__(self, table: Any, column: str, name: str, rows: np.ndarray | None = None) -> None:
        self._column = column
        self._numbers: Sequence[int] | np.ndarray = range(len(table)) if rows is None else rows
        chosen = table if rows is None else table.select(rows)
        self._rows = chosen.select_columns([column]).with_format("arrow")
        self._name = name
        digest = content_hash()
        with progress(len(self), f"checking {name}", "image") as bar:
            for batch in self._rows.iter(batch_size=1000):
                for value in self._encoded(batch):
                    if not value.is_valid:
                        raise UserError(
                            f"{name}: column {column} refers to files that are not embedded",
                            "embed the image bytes in the parquet files",
                        )
                    buffer = value.as_buffer()
                    digest.update(len(buffer).to_bytes(8, "little"))
                    digest.update(buffer)
                bar.update(len(batch))
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Image.Image:
        return _decode(io.BytesIO(self._encoded(self._rows[index])[0].as_py()), self.describe(index))

    def decoded(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """Reading the rows together takes a tenth of the time of reading each row separately."""
        encoded = self._encoded(self._rows[indices]).to_pylist()
        for index, content in zip(indices, encoded, strict=True):
            yield _decode(io.BytesIO(content), self.describe(index))

    def _encoded(self, rows: Any) -> Any:
        """The encoded bytes of a slice of the table, as an Arrow array."""
        return rows.column(self._column).combine_chunks().field("bytes")

    def describe(self, index: int) -> str:
        return f"{self._name} row {self._numbers[index]}"


class FileImages(Images):
    """Images in files; the fingerprint covers their relative names and their bytes, not their folder."""

    def __init__(self, root: Path, files: Sequence[Path]) -> None:
        self._files = list(files)
        digest = content_hash()
        with progress(len(self._files), f"checking {root}", "image") as bar:
            for index, file in enumerate(self._files):
                digest.update(os.fsencode(file.relative_to(root).as_posix()))
                try:
                    digest.update(file_checksum(file).encode())
                except OSError as error:
                    raise UserError(
                        f"{self.describe(index)} cannot be read: {error.strerror}", "make it readable or remove it"
                    ) from error
                bar.update()
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Image.Image:
        return _decode(self._files[index], self.describe(index))

    def describe(self, index: int) -> str:
        return f"image {self._files[index]}"
