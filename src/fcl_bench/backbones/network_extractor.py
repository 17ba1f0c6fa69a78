"""A network's frozen forward pass over images: precision, layout, and nothing that differs between two runs."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fcl_bench.backbones.backbone import Extractor
from fcl_bench.backbones.trainable import Trainable, weights_hash
from fcl_bench.data.images.batches import Standardise
from fcl_bench.data.images.pixels import load_pixels
from fcl_bench.data.sources.base import Split
from fcl_bench.environment import exact_kernels

PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: Pixels per forward pass on a CPU, whose caches hold no more: 4 images of 224 x 224, 196 of 32 x 32.
_CPU_PIXELS = 4 * 224 * 224


class FrozenNetwork(Extractor):
    """Extractor that runs a network in eval mode; where its images come from is the subclass's.

    Args:
        body: the network, which belongs to the extractor from now on.
        dimension: d, the features that it gives.
        precision: auto (float16 autocast on CUDA, float32 elsewhere), float32, float16 or bfloat16.
        device: where it runs.
    """

    cacheable = True

    def __init__(self, body: torch.nn.Module, dimension: int, precision: str, device: torch.device) -> None:
        if precision == "auto":
            precision = "float16" if device.type == "cuda" else "float32"
        self.identity = {"weights": weights_hash(body), "precision": precision, "device": device.type}
        self._dimension = dimension
        self._device = device
        self._dtype = PRECISIONS[precision]
        # Convolutions run faster with channels last; a network without them (a ViT) does not care.
        layout = torch.channels_last
        self._body = body.eval().requires_grad_(False).to(device, memory_format=layout)  # type: ignore[call-overload]

    def dimension(self, split: Split) -> int:
        return self._dimension

    def batches(self, split: Split, start: int = 0) -> Iterator[torch.Tensor]:
        for images in self._images(split, start):
            with torch.no_grad(), exact_kernels(), self._autocast():
                features = self._body(images)
            yield features.to("cpu", torch.float32)

    @abstractmethod
    def _images(self, split: Split, start: int) -> Iterator[torch.Tensor]:
        """Standardised images (b, 3, size, size), channels last, on the device: samples start, start + 1, ..."""

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, self._dtype)


class NetworkExtractor(FrozenNetwork):
    """A trained body, as it is now, over the images that it was trained on (see `load_pixels`): whole, not augmented.

    Args:
        body: the network; it is copied, so that training may go on.
        trainable: where the body came from.
        device: where it runs.
        precision: auto (float16 autocast on CUDA, float32 elsewhere), float32, float16 or bfloat16.
    """

    def __init__(
        self, body: torch.nn.Module, trainable: Trainable, device: torch.device, precision: str = "auto"
    ) -> None:
        super().__init__(copy.deepcopy(body), trainable.dimension, precision, device)
        self.identity = {**trainable.identity, **self.identity}
        self._size = trainable.size
        self._standardise = Standardise(trainable.size, trainable.mean, trainable.std)
        self._batch_size = 256 if device.type == "cuda" else min(256, max(1, _CPU_PIXELS // trainable.size**2))

    def _images(self, split: Split, start: int) -> Iterator[torch.Tensor]:
        pixels = load_pixels(split, self._size)
        for begin in range(start, len(pixels), self._batch_size):
            batch = pixels[begin : begin + self._batch_size]
            yield self._standardise(batch.to(self._device, non_blocking=True))
