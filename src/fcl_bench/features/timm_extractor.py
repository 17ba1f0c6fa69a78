"""Features of a frozen timm network under timm's own preprocessing, decoded ahead of it by threads."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from fcl_bench.data.sources import Split
from fcl_bench.environment import available_cores
from fcl_bench.features.network_extractor import FrozenNetwork

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
        self._mean = torch.tensor(data_config["mean"], device=device).view(1, 3, 1, 1)
        self._std = torch.tensor(data_config["std"], device=device).view(1, 3, 1, 1)
        self._batch_size = batch_size or (256 if device.type == "cuda" else 4)
        self._workers = workers or available_cores()

    def _images(self, split: Split, start: int) -> Iterator[torch.Tensor]:
        for pixels in self._pixels(split, start):
            images = torch.from_numpy(pixels).to(self._device, non_blocking=True)
            images = images.to(torch.float32).div_(255).sub_(self._mean).div_(self._std)
            yield images.contiguous(memory_format=torch.channels_last)

    def _pixels(self, split: Split, start: int) -> Iterator[np.ndarray]:
        """uint8 batches (b, 3, size, size), decoded ahead of the network by threads."""

        def load(index: int) -> np.ndarray:
            return self._transform(split.inputs[index].convert("RGB"))

        with ThreadPoolExecutor(self._workers) as pool:
            waiting: deque[list[Future[np.ndarray]]] = deque()
            try:
                for begin in range(start, len(split), self._batch_size):
                    batch = range(begin, min(begin + self._batch_size, len(split)))
                    waiting.append([pool.submit(load, index) for index in batch])
                    if len(waiting) > BATCHES_AHEAD:
                        yield np.stack([future.result() for future in waiting.popleft()])
                while waiting:
                    yield np.stack([future.result() for future in waiting.popleft()])
            finally:
                # An error or an interrupt must not wait for images that nobody will look at.
                pool.shutdown(wait=False, cancel_futures=True)
