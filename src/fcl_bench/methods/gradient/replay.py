"""Batches of a client's own samples and some others, for methods that replay."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fcl_bench.data.images.batches import Augmentation, Samples


class Replayed(Samples):
    """A client's own samples, and in every batch some others: its memory, or images that a generator made.

    Args:
        others: at least one; they are drawn with replacement.
        seed: of the draws of the others, so that the batches of a client's own samples stay those that they would be
            without others, bit for bit.
    """

    def __init__(self, own: Samples, others: Samples, seed: int, count: int) -> None:
        super().__init__(own.inputs, own.labels)
        self._own, self._others, self._count = own, others, count
        self._generator = torch.Generator().manual_seed(seed)

    def batches(
        self, size: int, augment: Augmentation, generator: torch.Generator
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for inputs, labels in self._own.batches(size, augment, generator):
            chosen = torch.randint(len(self._others), (self._count,), generator=self._generator).to(inputs.device)
            more = augment(self._others.inputs[chosen], self._generator)
            yield torch.cat([inputs, more]), torch.cat([labels, self._others.labels[chosen]])
