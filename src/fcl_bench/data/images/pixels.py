"""All images of a split as one tensor of bytes, for training that reads every image many times."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageOps

from fcl_bench.data.images.stored import ArrayImages, Images, decoded
from fcl_bench.data.shared import shared
from fcl_bench.environment import available_cores
from fcl_bench.errors import require_memory
from fcl_bench.tracking.console import progress

if TYPE_CHECKING:
    from fcl_bench.data.sources.base import Split

#: Images that one thread decodes at a time: enough to hide the cost of handing work over, few enough to stop soon.
_CHUNK = 64
#: Image sides (pixels) up to which one thread is as fast as two and faster than sixteen: Python's lock is mostly held.
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
        (n, 3, h, w) uint8 on the CPU, contiguous; grey and other modes are converted to RGB. Callers must not change
        it: other jobs of this process may get it too.

    Raises:
        UserError: an image can't be read, or the pixels need more memory than the machine has.
    """
    images = split.inputs
    assert not isinstance(images, np.ndarray), "ready features have no pixels"
    key = [split.fingerprint, size] if split.fingerprint else None
    return shared("images", key, lambda: _load(images, size, what), lambda pixels: pixels.nbytes)


def _load(images: Images, size: int, what: str) -> torch.Tensor:
    width, height = images[0].size if len(images) else (size, size)
    threads = 1 if max(height, width) <= _TINY else available_cores()
    if max(height, width) <= size:
        if isinstance(images, ArrayImages) and images.pixels.shape[3:] in ((), (3,)):
            out, pixels = _room(len(images), height, width, what), images.pixels
            out[:] = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
            return torch.from_numpy(out)
        try:
            return _decode_all(images, height, width, threads, what, crop=False)
        except _SizesDifferError:
            pass
    return _decode_all(images, size, size, threads, what, crop=True)


def _room(count: int, height: int, width: int, what: str) -> np.ndarray:
    """An uninitialised tensor for `count` images (count, 3, height, width)."""
    require_memory(what, count * 3 * height * width, f"{count} images of {height} x {width} pixels")
    return np.empty((count, 3, height, width), dtype=np.uint8)


def _decode_all(images: Images, height: int, width: int, threads: int, what: str, *, crop: bool) -> torch.Tensor:
    """All images as (n, 3, height, width), resized and cropped to that size, or refused if one has another size."""
    out = _room(len(images), height, width, what)

    def decode(chunk: range) -> int:
        for index, image in zip(chunk, decoded(images, chunk), strict=True):
            if not crop and image.size != (width, height):
                raise _SizesDifferError
            rgb = image.convert("RGB")
            shown = ImageOps.fit(rgb, (width, height), Image.Resampling.BICUBIC) if crop else rgb
            out[index] = np.asarray(shown).transpose(2, 0, 1)
        return len(chunk)

    chunks = [range(begin, min(begin + _CHUNK, len(images))) for begin in range(0, len(images), _CHUNK)]
    with (
        ThreadPoolExecutor(threads) as pool,
        progress(len(images), f"decoding {what}", "image") as bar,
    ):
        try:
            # In order, so that the error names the first bad image.
            for future in [pool.submit(decode, chunk) for chunk in chunks]:
                bar.update(future.result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return torch.from_numpy(out)
