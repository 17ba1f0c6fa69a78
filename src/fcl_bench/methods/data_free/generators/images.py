"""What the data-free methods make images with and do with them: a generator, a pool of its images, and a student.

Images are drawn for a client's steps from a random stream of their own, so that the batches of its own samples stay
those that they would be without, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.nn.functional import interpolate

from fcl_bench.data.images.batches import Augmentation
from fcl_bench.training.network import Network

#: Channels of the first layers, as in TARGET's, LANDER's and MFCL's public code; the later ones have half as many.
WIDTH = 128


class ImageGenerator(nn.Module):
    """Inputs (n, inputs) to images (n, 3, size, size).

    Linear to (128, s, s) with s = size / 4, batch norm, twice the size, convolution to 128 channels, batch norm, leaky
    ReLU (0.2), twice the size, convolution to 64 channels, batch norm, leaky ReLU, convolution to 3 channels, `output`.
    At 32 pixels that is 2,328,899 parameters with 256 inputs (TARGET) and 8,423,939 with 1,000 (MFCL).

    The weights are drawn from torch's own generator, so whoever makes one seeds that.

    Args:
        inputs: numbers that an image is made of.
        size: side of the square images in pixels. If it is no multiple of 4, more is made and the centre is taken.
        output: sigmoid: pixels from 0 to 1; tanh: batch norm without parameters after it, so that images are on the
            scale of standardised ones, and biases in all convolutions.
        eps: of the batch norms after convolutions (MFCL: 0.8).
        width: channels of the first layers, 2 or more; 128 in all that is said above.
    """

    def __init__(self, inputs: int, size: int, output: str = "sigmoid", eps: float = 1e-5, width: int = WIDTH) -> None:
        super().__init__()
        self.inputs, self.size, self._width = inputs, size, width
        self._side = -(-size // 4)
        self.first = nn.Linear(inputs, width * self._side**2)
        self.first_norm = nn.BatchNorm2d(width)
        # Batch norm takes a bias out again. MFCL's code has biases all the same, and they travel.
        bias = output == "tanh"
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=bias)
        self.second_norm = nn.BatchNorm2d(width, eps)
        self.third = nn.Conv2d(width, width // 2, 3, padding=1, bias=bias)
        self.third_norm = nn.BatchNorm2d(width // 2, eps)
        self.last = nn.Conv2d(width // 2, 3, 3, padding=1)
        self.output = nn.Sigmoid() if output == "sigmoid" else nn.Sequential(nn.Tanh(), nn.BatchNorm2d(3, affine=False))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Images (n, 3, size, size) of `inputs` (n, inputs)."""
        maps = self.first_norm(self.first(inputs).view(-1, self._width, self._side, self._side))
        maps = _leaky(self.second_norm(self.second(interpolate(maps, scale_factor=2))))
        maps = _leaky(self.third_norm(self.third(interpolate(maps, scale_factor=2))))
        before = (4 * self._side - self.size) // 2
        centre = slice(before, before + self.size)
        image: torch.Tensor = self.output(self.last(maps)[..., centre, centre])
        return image

    def noise(self, count: int, generator: torch.Generator | None = None) -> torch.Tensor:
        """(count, inputs) standard normal.

        Args:
            generator: on the CPU; None: torch's own.
        """
        return torch.randn((count, self.inputs), generator=generator).to(self.first.weight)

    def state(self) -> dict[str, torch.Tensor]:
        """All weights and running statistics, by name."""
        return {name: value for name, value in self.state_dict().items() if value.is_floating_point()}

    def load(self, values: dict[str, torch.Tensor]) -> None:
        """Take over what `state` returned, or a part of it."""
        self.load_state_dict(values, strict=False)


def _leaky(maps: torch.Tensor) -> torch.Tensor:
    return nn.functional.leaky_relu(maps, 0.2)


def to_bytes(pixels: torch.Tensor) -> torch.Tensor:
    """Images from 0 to 1 as uint8, as they travel and as clients hold their own."""
    return (pixels.detach().clamp(0, 1) * 255).round().to(torch.uint8)


class ImagePool:
    """Images that were sent, in shuffled passes; after the last image a new pass begins.

    Args:
        images: (n, 3, h, w) uint8, at least one.
        seed: of the order and of augmentation.
        augment: see `Augment`.
        standardise: bytes to what the network sees.
    """

    def __init__(
        self,
        images: torch.Tensor,
        seed: int,
        augment: Augmentation,
        standardise: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._images, self._augment, self._standardise = images, augment, standardise
        self._generator = torch.Generator().manual_seed(seed)
        self._waiting = torch.empty(0, dtype=torch.int64)

    def next(self, count: int) -> torch.Tensor:
        """(count, 3, size, size) as the network sees them."""
        while len(self._waiting) < count:
            self._waiting = torch.cat([self._waiting, torch.randperm(len(self._images), generator=self._generator)])
        chosen, self._waiting = self._waiting[:count].to(self._images.device), self._waiting[count:]
        return self._standardise(self._augment(self._images.index_select(0, chosen), self._generator))


#: The kind of the network; the student is of the same kind.
N = TypeVar("N", bound=Network)


def reinitialised(network: N) -> N:
    """A copy in training mode whose layers all have new weights, drawn as torch does by default."""
    student = copy.deepcopy(network)
    for module in student.modules():
        renew = getattr(module, "reset_parameters", None)
        # torch warns of a head without classes, which has nothing to renew.
        if callable(renew) and any(own.numel() for own in module.parameters(recurse=False)):
            renew()
    for name, value in student.named_parameters():
        # Parameters that never train are not learnt anew.
        value.requires_grad_(name not in student.never_trains)
        value.grad = None
    student.train()
    return student


def agreement(scores: torch.Tensor, wanted: torch.Tensor, temperature: float) -> torch.Tensor:
    """KL_T(a || b) = T^2 KL(softmax(wanted / T) || softmax(scores / T)) of each sample, (b,)."""
    log_scores, log_wanted = (scores / temperature).log_softmax(dim=1), (wanted / temperature).log_softmax(dim=1)
    return temperature**2 * (log_wanted.exp() * (log_wanted - log_scores)).sum(dim=1)


def opposition(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """-mean 1(both name the same class) KL_1 of student and teacher (b, C): lowest if the student can't follow."""
    agree = (scores.argmax(dim=1) == wanted.argmax(dim=1)).to(scores.dtype)
    return -(agree * agreement(scores, wanted, 1.0)).mean()
