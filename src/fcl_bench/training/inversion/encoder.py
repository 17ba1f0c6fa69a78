"""The small network of known weights over which clients differentiate single samples (GLFC's and LGA's LeNet)."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.func import grad, vmap
from torch.nn.functional import conv2d, cross_entropy, linear

#: Filters of every convolution, and their side.
_CHANNELS, _KERNEL = 12, 5
#: From this side on the first convolution steps over 4 pixels, as LGA's code has it for 64 x 64.
_LARGE = 64


def default_strides(side: int) -> tuple[int, ...]:
    """The strides of the three convolutions for images of this (shorter) side."""
    return (4 if side >= _LARGE else 2), 2, 1


class GradientEncoder:
    """Sigmoid convolutions and a linear layer with a row for each class; nobody ever trains it.

    All weights and biases are uniform in +-1/2, by a seed that both halves know, so that the network never travels. The
    server does not know how many classes the stream will bring. Therefore the linear layer has a row for each class
    seen so far, and a new task appends rows: the rows that an encoder of fewer classes has are the same.

    A gradient is one row of p numbers: each convolution's weights and biases, then those of the linear layer. With 32 x
    32 pixels, three convolutions and C classes p = 8,136 + 769 C; 85,036 for C = 100.

    Args:
        shape: (h, w) of the images, which have 3 channels.
        classes: C.
        seed: of the weights.
        strides: of the convolutions, which are as many; None: three, see `default_strides`.
        dtype, device: in which and where it computes.

    Attributes:
        features: what the linear layer takes: 12 times the pixels of the last convolution's output.
        numbers: p.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        classes: int,
        seed: int,
        strides: tuple[int, ...] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.shape, self.classes = shape, classes
        self._strides = default_strides(min(shape)) if strides is None else strides
        sides = list(shape)
        for stride in self._strides:
            sides = [-(-side // stride) for side in sides]
        self.features = _CHANNELS * math.prod(sides)
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.rand, generator=generator)
        weights: list[torch.Tensor] = []
        for layer in range(len(self._strides)):
            weights += [draw(_CHANNELS, _CHANNELS if layer else 3, _KERNEL, _KERNEL), draw(_CHANNELS)]
        # Row by row, so that a new class leaves the others' rows as they are.
        rows = torch.stack([draw(self.features + 1) for _ in range(classes)])
        weights += [rows[:, :-1].contiguous(), rows[:, -1].contiguous()]
        self._weights = tuple((weight - 0.5).to(device, dtype) for weight in weights)
        self.numbers = sum(weight.numel() for weight in weights)
        self._each = vmap(grad(self._loss), in_dims=(None, 0, 0))

    def scores(self, images: torch.Tensor) -> torch.Tensor:
        """(n, C) of images (n, 3, h, w) with pixels from 0 to 1."""
        return self._scores(self._weights, images)

    def gradients(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(n, p): of each sample's cross-entropy over all weights, differentiable in the images.

        Args:
            images: (n, 3, h, w) with pixels from 0 to 1.
            labels: (n,) columns.
        """
        if not len(labels):  # which vmap does not take
            return images.new_empty(0, self.numbers)
        found = self._each(self._weights, images, labels)
        return torch.cat([part.flatten(1) for part in found], dim=1)

    def labels(self, gradients: torch.Tensor) -> torch.Tensor:
        """(n,) of which class the samples are whose gradients (n, p) these are; exact.

        Row c of the linear layer's gradient is (softmax(q)_c - y_c) h with positive h: only the true class's sum is
        negative.
        """
        begin = self.numbers - self.classes * (self.features + 1)
        rows = gradients[:, begin : begin + self.classes * self.features]
        return rows.unflatten(1, (self.classes, self.features)).sum(dim=2).argmin(dim=1)

    def _scores(self, weights: tuple[torch.Tensor, ...], images: torch.Tensor) -> torch.Tensor:
        for stride, weight, bias in zip(self._strides, weights[::2], weights[1::2], strict=False):
            images = conv2d(images, weight, bias, stride, padding=_KERNEL // 2).sigmoid()
        return linear(images.flatten(1), *weights[-2:])

    def _loss(self, weights: tuple[torch.Tensor, ...], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self._scores(weights, image[None]), label[None])
