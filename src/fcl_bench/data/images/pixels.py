"""A whole split's images as one tensor of bytes, for training that sees every image many times."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageOps

from fcl_bench.data.images.stored import ArrayImages, Images, decoded
from fcl_bench.environment import available_cores
from fcl_bench.errors import require_memory
from fcl_bench.tracking.console import progress

if TYPE_CHECKING:
    from fcl_bench.data.sources.base import Split

#: Images that one thread decodes at a time: enough to hide the cost of a hand-over, few enough to stop soon.
_CHUNK = 64
#: Sides up to which one thread decodes as fast as two, and faster than sixteen: most of the work holds Python's lock.
_TINY = 32


class _SizesDifferError(Exception):
    """Not all images have the size of the first one."""


def load_pixels(split: Split, size: int, *, what: str = "data") -> torch.Tensor:
    """Decode all images of `split`, in order.

    Images of one size with both sides at most `size` keep it (enlarging them is left to the device, in batches).
    Otherwise each is resized so that its shorter side is `size` (bicubic) and cropped to its centre.

    Args:
        split: a split that holds images.
        size: side in pixels of the square that the network sees.
        what: the split's name in messages ("data=cifar100").

    Returns:
        (n, 3, h, w) uint8 on the CPU, contiguous; grey and other modes are converted to RGB.

    Raises:
        UserError: an image can't be read, or the pixels need more memory than the machine has.
    """
    images = split.inputs
    assert not isinstance(images, np.ndarray), "ready features have no pixels"
    height, width = _size_of(images[0]) if len(images) else (size, size)
    threads = 1 if max(height, width) <= _TINY else available_cores()
    if max(height, width) <= size:
        if isinstance(images, ArrayImages) and images.pixels.shape[3:] in ((), (3,)):
            return torch.from_numpy(_as_rgb(images.pixels, _room(len(images), height, width, what)))
        try:
            return _decode_all(images, height, width, _as_they_are(height, width), threads, what)
        except _SizesDifferError:
            pass
    return _decode_all(images, size, size, _cropped(size), threads, what)


def _size_of(image: Image.Image) -> tuple[int, int]:
    return image.height, image.width


def _as_they_are(height: int, width: int) -> Callable[[Image.Image], Image.Image]:
    def checked(image: Image.Image) -> Image.Image:
        if _size_of(image) != (height, width):
            raise _SizesDifferError
        return image.convert("RGB")

    return checked


def _cropped(size: int) -> Callable[[Image.Image], Image.Image]:
    return lambda image: ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BICUBIC)


def _room(count: int, height: int, width: int, what: str) -> np.ndarray:
    """Room for `count` images (count, 3, height, width)."""
    require_memory(what, count * 3 * height * width, f"{count} images of {height} x {width} pixels")
    return np.empty((count, 3, height, width), dtype=np.uint8)


def _as_rgb(pixels: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Copy grey (n, h, w) or colour (n, h, w, 3) pixels into `out` (n, 3, h, w)."""
    out[:] = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
    return out


def _decode_all(
    images: Images, height: int, width: int, convert: Callable[[Image.Image], Image.Image], threads: int, what: str
) -> torch.Tensor:
    """All images as (n, 3, height, width), each brought to that size by `convert`."""
    out = _room(len(images), height, width, what)

    def decode(chunk: range) -> int:
        for index, image in zip(chunk, decoded(images, chunk), strict=True):
            out[index] = np.asarray(convert(image)).transpose(2, 0, 1)
        return len(chunk)

    chunks = [range(begin, min(begin + _CHUNK, len(images))) for begin in range(0, len(images), _CHUNK)]
    with (
        ThreadPoolExecutor(threads) as pool,
        progress(len(images), f"decoding {what}", "image") as bar,
    ):
        try:
            # In order, so that of several bad images the first one is named.
            for future in [pool.submit(decode, chunk) for chunk in chunks]:
                bar.update(future.result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return torch.from_numpy(out)
