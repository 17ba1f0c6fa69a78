"""What a client trains on: its own samples, and what a method adds to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from fcl_bench.data.images.batches import epoch_batches

#: Changes a batch (b, ...) at random, by draws of the generator; see `Augment`.
Augmentation = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


class Samples:
    """A client's own samples, in shuffled batches.

    Args:
        inputs: (n, ...) images in uint8, or features, on the network's device.
        labels: (n,) int64.
    """

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self, size: int, augment: Augmentation, generator: torch.Generator
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """One pass: (b, ...) inputs, augmented if they are images, and (b,) labels; every draw is of `generator`."""
        for chosen in epoch_batches(len(self), size, generator, self.inputs.device):
            yield self.batch(chosen, augment, generator)

    def batch(
        self, chosen: torch.Tensor, augment: Augmentation, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The samples of one batch, of `batches`; `chosen` (b,) says which, and any draw is of `generator`."""
        return augmented(self.inputs.index_select(0, chosen), augment, generator), self.labels.index_select(0, chosen)


class Pool:
    """Samples to draw from beside a client's own: its memory, or images that a generator made.

    Args:
        inputs, labels: as of `Samples`; at least one.
        seed: of a random stream of its own, so that the batches of a client's own samples stay those that they would be
            without a pool, bit for bit.
    """

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor, seed: int) -> None:
        self._inputs, self._labels = inputs, labels
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, count: int, augment: Augmentation | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """`count` samples with their labels, drawn with replacement."""
        chosen = torch.randint(len(self._labels), (count,), generator=self._generator).to(self._inputs.device)
        inputs = self._inputs[chosen]
        return augmented(inputs, augment, self._generator) if augment else inputs, self._labels[chosen]


class Replayed(Samples):
    """A client's own samples, and in every batch as many as asked for of a pool.

    Args:
        own: the client's.
        pool: what is added.
        count: samples of the pool in each batch.
    """

    def __init__(self, own: Samples, pool: Pool, count: int) -> None:
        super().__init__(own.inputs, own.labels)
        self._own, self._pool, self._count = own, pool, count

    def batches(
        self, size: int, augment: Augmentation, generator: torch.Generator
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for inputs, labels in self._own.batches(size, augment, generator):
            more, theirs = self._pool.draw(self._count, augment)
            yield torch.cat([inputs, more]), torch.cat([labels, theirs])


def augmented(inputs: torch.Tensor, augment: Augmentation, generator: torch.Generator) -> torch.Tensor:
    """Images after `augment`; features as they are."""
    return augment(inputs, generator) if inputs.dtype == torch.uint8 else inputs
