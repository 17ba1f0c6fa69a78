"""What a network is given: all images as bytes, samples in shuffled batches, their augmentation and standardisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.nn.functional import interpolate, pad

from fcl_bench.data.images.stored import ArrayImages, Images
from fcl_bench.data.shared import shared
from fcl_bench.environment import available_cores
from fcl_bench.errors import require_memory
from fcl_bench.tracking.console import progress

if TYPE_CHECKING:
    from fcl_bench.data.sources.base import Split

#: Changes a batch (b, ...) at random, by draws of the generator; see `Augment`.
Augmentation = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
#: What `Augment` can do to training images.
AUGMENTATIONS = ("none", "crop", "crop_flip", "crop_flip_brightness")
#: The largest change of brightness, up or down, under `crop_flip_brightness`.
_BRIGHTNESS = 63 / 255
#: Images that one thread decodes at a time: enough to hide the cost of handing work over, few enough to stop soon.
_CHUNK = 64
#: Image sides (pixels) up to which one thread is as fast as two and faster than sixteen: Python's lock is mostly held.
_TINY = 32


def epoch_batches(
    n: int, batch_size: int, generator: torch.Generator, device: torch.device | None = None
) -> Iterator[torch.Tensor]:
    """A shuffled pass over n samples, as indices (b,) int64. One draw of `generator`, at the call, gives its order.

    Batch norm cannot train on a single sample, so one that is left over joins the batch before it, if there is one
    (and `batch_size` is not 1).

    Args:
        n: number of samples; 0 gives no batches.
        batch_size: samples per batch; the last batch has the rest, or one sample more than the others.
        generator: on the CPU.
        device: where the indices are wanted, which are copied there once; None: the CPU.
    """
    order = torch.randperm(n, generator=generator).to(device or "cpu")
    sizes, left = [batch_size] * (n // batch_size), n % batch_size
    if left == 1 and sizes:
        sizes[-1] += 1
    elif left:
        sizes.append(left)
    return iter(order.split(sizes) if sizes else ())


class Augment:
    """Random crops, flips and brightness of whole batches, the same on every device.

    Args:
        kind: "none"; "crop": an eighth of the side in zeros all round, then a random crop of the original size;
            "crop_flip": that, of the mirrored image with probability 1/2; "crop_flip_brightness": that, times a factor
            that is uniform in 1 +- 63/255, white at most.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Augment each image independently.

        Args:
            images: (b, 3, h, w) uint8 on any device; not modified. Or float from 0 to 1, as a generator makes them: the
                result is then differentiable. Features (b, d) stay as they are.
            generator: on the CPU, so that the draws don't depend on the device.

        Returns:
            (b, 3, h, w) of the same type on the same device; `images` itself if nothing can change.
        """
        if self.kind == "none" or images.dim() < 4 or not len(images):
            return images
        moved = self._moved(images, generator)
        return self._brightened(moved, generator) if self.kind == "crop_flip_brightness" else moved

    def _moved(self, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        count, channels, height, width = images.shape
        # The images padded with zeros, also mirrored if flips may be drawn: (1 or 2, b, 3, h + 2 h//8, w + 2 w//8).
        versions = [images, images.flip(3)] if self.kind != "crop" else [images]
        down, across = height // 8, width // 8
        padded = pad(torch.stack(versions), (across, across, down, down)).contiguous()
        down, across = padded.shape[3], padded.shape[4]
        version = torch.randint(len(padded), (count,), generator=generator)
        top = torch.randint(down - height + 1, (count,), generator=generator)
        left = torch.randint(across - width + 1, (count,), generator=generator)
        # Every row of a crop is `width` consecutive bytes, so crops are rows of an overlapping view. This takes half
        # the time of a gather and a third of that of advanced indexing, with one small copy to the device.
        corner = ((version * count + torch.arange(count)) * channels * down + top) * across + left
        planes = torch.arange(channels, device=images.device) * (down * across)
        rows = torch.arange(height, device=images.device) * across
        starts = corner.to(images.device, non_blocking=True)[:, None, None] + planes[:, None] + rows
        if images.is_floating_point():
            # Gradients pass through single pixels; gradients of the view would take `width` times the images' memory.
            pixels = starts[..., None] + torch.arange(width, device=images.device)
            return padded.flatten().index_select(0, pixels.flatten()).view(images.shape)
        spans = padded.as_strided((padded.numel() - width + 1, width), (1, 1))
        return spans.index_select(0, starts.flatten()).view(images.shape)

    def _brightened(self, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        factors = 1 + _BRIGHTNESS * (2 * torch.rand(len(images), generator=generator) - 1)
        factors = factors.to(images.device, non_blocking=True).view(-1, 1, 1, 1)
        if images.is_floating_point():
            return (images * factors).clamp(0, 1)
        return (images * factors).round_().clamp_(0, 255).to(images.dtype)


class Standardise:
    """Convert image bytes to the network's standardised input.

    Args:
        size: side in pixels of the square that the network sees.
        mean, std: per channel, on pixels scaled to 0..1.
    """

    def __init__(self, size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.size = size
        #: Mean and deviation, on the device where they were last used.
        self._statistics = torch.tensor([mean, std]).view(2, 1, -1, 1, 1)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Resize (bicubic, antialiased) to `size` where needed, scale to 0..1, subtract the mean, divide by std.

        Args:
            images: (b, 3, h, w) uint8 on any device; only the central square of a non-square image is used.

        Returns:
            (b, 3, size, size) float32 on that device, channels last.
        """
        self._statistics = self._statistics.to(images.device)
        mean, std = self._statistics
        return self.scaled(images).sub_(mean).div_(std)

    def scaled(self, images: torch.Tensor) -> torch.Tensor:
        """The images at the network's size with pixels from 0 to 1, before standardisation: the input of `pixels`."""
        height, width = images.shape[-2:]
        square = images if height == width else _central_square(images)
        if square.shape[-1] == self.size:
            # One pass over the images; always a copy, since what follows is done in place.
            return square.to(torch.float32, memory_format=torch.channels_last, copy=True).div_(255)
        pixels = interpolate(square.to(torch.float32), (self.size, self.size), mode="bicubic", antialias=True)
        return pixels.clamp_(0, 255).contiguous(memory_format=torch.channels_last).div_(255)

    def pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Standardise images (b, 3, size, size) with pixels from 0 to 1, as a generator makes them; differentiable."""
        self._statistics = self._statistics.to(images.device)
        mean, std = self._statistics
        return (images - mean) / std


def _central_square(images: torch.Tensor) -> torch.Tensor:
    height, width = images.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return images[..., top : top + side, left : left + side]


@dataclass(eq=False)
class Samples:
    """A client's own samples, in shuffled batches.

    Attributes:
        inputs: (n, ...) images in uint8, or features, on the network's device.
    """

    inputs: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self, size: int, augment: Augmentation, generator: torch.Generator
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """One pass: (b, ...) inputs, augmented if they are images, and (b,) labels; every draw is of `generator`."""
        for chosen in epoch_batches(len(self), size, generator, self.inputs.device):
            yield augment(self.inputs.index_select(0, chosen), generator), self.labels.index_select(0, chosen)


class _SizesDifferError(Exception):
    """Not all images have the size of the first one."""


def load_pixels(split: Split, size: int, *, what: str = "data") -> torch.Tensor:
    """Decode all images of `split`, in order.

    Images of one size with both sides at most `size` keep it (enlarging them is left to the device, in batches).
    Otherwise each is resized so that its shorter side is `size` (bicubic) and cropped to its centre.

    Args:
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
        for index, image in zip(chunk, images.decoded(chunk), strict=True):
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
