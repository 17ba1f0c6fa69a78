"""Features of a frozen timm network under timm's own preprocessing, decoded ahead of it by threads."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from fcl_bench.backbones.network_extractor import FrozenNetwork
from fcl_bench.data.images.stored import decoded
from fcl_bench.data.sources.base import Split
from fcl_bench.environment import available_cores

#: Decoded batches that wait for the network: enough to overlap, few enough to keep memory flat.
BATCHES_AHEAD = 3


class TimmExtractor(FrozenNetwork):
    """A timm network over images that timm's transform resizes and crops.

    Args:
        model: the network, which belongs to the extractor from now on.
        dimension: d.
        made_of: what the network was made of, for the identity.
        data_config: timm's: input_size, crop_pct, interpolation, mean, std.
        precision: auto, float32, float16 or bfloat16.
        batch_size: images per forward pass; None: 256 on CUDA, 4 elsewhere.
        workers: threads that decode and resize; None: one for each core.
        device: where the network runs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        dimension: int,
        made_of: dict[str, str],
        data_config: dict[str, Any],
        precision: str,
        batch_size: int | None,
        workers: int | None,
        device: torch.device,
    ) -> None:
        from timm.data import create_transform

        super().__init__(model, dimension, precision, device)
        transform = json.dumps(data_config, sort_keys=True, default=str)
        self.identity = {**made_of, **self.identity, "transform": transform}
        # The threads decode and resize to uint8; scaling happens on the device, in whole batches.
        self._transform = create_transform(**data_config, is_training=False, use_prefetcher=True)
        self._mean, self._std = (
            _image_of(data_config[name], data_config["input_size"], device) for name in ("mean", "std")
        )
        self._batch_size = batch_size or (256 if device.type == "cuda" else 4)
        self._workers = workers or available_cores()

    def _images(self, split: Split, start: int) -> Iterator[torch.Tensor]:
        for pixels in self._pixels(split, start):
            images = torch.from_numpy(pixels).to(self._device, non_blocking=True)
            images = images.to(torch.float32, memory_format=torch.channels_last)
            yield images.div_(255).sub_(self._mean).div_(self._std)

    def _pixels(self, split: Split, start: int) -> Iterator[np.ndarray]:
        """uint8 batches (b, 3, size, size), decoded ahead of the network by threads."""
        inputs = split.inputs
        assert not isinstance(inputs, np.ndarray), "ready features have no pixels"
        # Rows of a table are read in pieces, which is quicker; every thread has one of each batch.
        piece = max(1, self._batch_size // self._workers)

        def load(indices: range) -> list[np.ndarray]:
            return [self._transform(image.convert("RGB")) for image in decoded(inputs, indices)]

        with ThreadPoolExecutor(self._workers) as pool:
            waiting: deque[list[Future[list[np.ndarray]]]] = deque()
            try:
                for begin in range(start, len(split), self._batch_size):
                    end = min(begin + self._batch_size, len(split))
                    pieces = [range(first, min(first + piece, end)) for first in range(begin, end, piece)]
                    waiting.append([pool.submit(load, indices) for indices in pieces])
                    if len(waiting) > BATCHES_AHEAD:
                        yield _stacked(waiting.popleft())
                while waiting:
                    yield _stacked(waiting.popleft())
            finally:
                # An error or an interrupt must not wait for images that nobody will look at.
                pool.shutdown(wait=False, cancel_futures=True)


def _stacked(pieces: list[Future[list[np.ndarray]]]) -> np.ndarray:
    return np.stack([image for piece in pieces for image in piece.result()])


def _image_of(colour: tuple[float, float, float], shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """(1, *shape), channels last: as large as an image, so that arithmetic with one runs over memory in one go.

    Against three numbers torch works pixel by pixel, which takes four times as long.
    """
    values = torch.tensor(colour, device=device).view(1, 3, 1, 1)
    return values.expand(1, *shape).contiguous(memory_format=torch.channels_last)
