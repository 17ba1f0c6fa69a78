"""Synthetic samples for a client's steps, from a random stream of their own.

So the batches of a client's own samples stay those that they would be without, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fcl_bench.data.images.batches import Augmentation, Standardise
from fcl_bench.methods.data_free.generators.images import ImageGenerator


class ImagePool:
    """Images that were sent, in shuffled passes; after the last image a new pass begins.

    Args:
        images: (n, 3, h, w) uint8, at least one.
        labels: (n,) their columns.
        seed: of the order and of augmentation.
        augment: see `Augment`.
        standardise: bytes to what the network sees.
    """

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        seed: int,
        augment: Augmentation,
        standardise: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._images, self._labels = images, labels
        self._augment, self._standardise = augment, standardise
        self._generator = torch.Generator().manual_seed(seed)
        self._waiting = torch.empty(0, dtype=torch.int64)

    def next(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(count, 3, size, size) as the network sees them, and (count,) their columns."""
        while len(self._waiting) < count:
            self._waiting = torch.cat([self._waiting, torch.randperm(len(self._labels), generator=self._generator)])
        chosen, self._waiting = self._waiting[:count].to(self._labels.device), self._waiting[count:]
        images = self._augment(self._images.index_select(0, chosen), self._generator)
        return self._standardise(images), self._labels[chosen]


class GeneratedImages:
    """Images that a client draws from a generator that was sent, new ones in every batch.

    Args:
        generator: with pixels from 0 to 1. It works in training mode: its batch norms use the statistics of the batch,
            as they did while it learnt, so that running ones need not be sent.
        seed: of the noise and of augmentation.
        augment: see `Augment`.
        standardise: images to what the network sees.
    """

    def __init__(self, generator: ImageGenerator, seed: int, augment: Augmentation, standardise: Standardise) -> None:
        self._generator = generator
        self._augment, self._standardise = augment, standardise
        self._draws = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def pixels(self, count: int) -> torch.Tensor:
        """(count, 3, size, size) from 0 to 1."""
        return self._generator.train()(self._generator.noise(count, self._draws))

    def next(self, count: int) -> torch.Tensor:
        """(count, 3, size, size) as the network sees them."""
        return self._standardise.pixels(self._augment(self.pixels(count), self._draws))
