"""The equations of a variational autoencoder, for many of them at once: their weights are rows of one matrix.

Encoder: h = tanh(W x + b), and the mean m and the log-variance v of z, linear in h.
Decoder: x^ = sigmoid(W' tanh(W'' z + b'') + b').
All functions take a leading dimension of classes.

Random numbers are drawn by key and place: a class's numbers do not depend on the classes beside it. A number is a hash
of its key and its place (SplitMix64's; Steele, Lea and Flood, OOPSLA 2014), so that the streams of any number of
classes are drawn in one operation, in any order, and again whenever they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar

import torch

#: The golden ratio's odd multiplier, and SplitMix64's two, as signed 64-bit numbers.
_GOLDEN, _FIRST, _SECOND = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
#: Bits of a uniform number: as many as float32 holds.
_BITS = 24


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """A logical shift to the right of int64."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)


def keys(seed: int, numbers: torch.Tensor) -> torch.Tensor:
    """A key (int64) for each of `numbers`, columns of classes for instance, under a 63-bit seed."""
    return _mixed(_mixed(torch.as_tensor(seed, device=numbers.device)) + numbers.long() * _GOLDEN)


def further(keys: torch.Tensor, number: int | torch.Tensor) -> torch.Tensor:
    """Keys derived from these for a purpose, a step or the like."""
    # A tensor, since its products wrap around.
    return _mixed(keys + (torch.as_tensor(number, device=keys.device) + 1) * _GOLDEN)


def _hashes(keys: torch.Tensor, count: int) -> torch.Tensor:
    """(k, count) int64 for keys (k,). A larger count begins with the same numbers."""
    places = torch.arange(1, count + 1, device=keys.device) * _GOLDEN
    return _mixed(keys.unsqueeze(1) + places)


def _uniform(bits: torch.Tensor, high: bool) -> torch.Tensor:
    """Numbers above 0 and at most 1, in float32, from the upper or the lower half of the bits."""
    chosen = _shifted(bits, 64 - _BITS) if high else bits & ((1 << _BITS) - 1)
    return (chosen.float() + 0.5) / 2**_BITS


def uniforms(keys: torch.Tensor, count: int) -> torch.Tensor:
    """(k, count) float32 between 0 and 1 for keys (k,)."""
    return _uniform(_hashes(keys, count), high=True)


def normals(keys: torch.Tensor, count: int) -> torch.Tensor:
    """(k, count) float32 standard normal for keys (k,), by Box and Muller's pairs."""
    bits = _hashes(keys, (count + 1) // 2)
    length = (-2 * _uniform(bits, high=True).log()).sqrt()
    angle = 2 * math.pi * _uniform(bits, high=False)
    return torch.stack([length * angle.cos(), length * angle.sin()], dim=2).flatten(1)[:, :count]


def orders(keys: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Random orders of 0 to counts - 1 for each key, followed by the rest of 0 to max(counts) - 1.

    Args:
        keys: (k,).
        counts: (k,).

    Returns:
        (k, max(counts)) int64.
    """
    width = int(counts.max())
    outside = torch.arange(width, device=keys.device) >= counts.unsqueeze(1)
    return _hashes(keys, width).masked_fill(outside, torch.iinfo(torch.int64).max).argsort(dim=1, stable=True)


#: Weights by name, each (c, ...).
Parts = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Architecture:
    """The sizes of an autoencoder.

    Attributes:
        inputs: d, the size of a feature.
        hidden: h, the size of the encoder's and of the decoder's hidden layer.
        latent: l, the size of z.
    """

    inputs: int
    hidden: int
    latent: int

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of one autoencoder's weights, in the order in which they lie."""
        layers = {
            "encoder": (self.hidden, self.inputs),
            "mean": (self.latent, self.hidden),
            "log_variance": (self.latent, self.hidden),
            "expander": (self.hidden, self.latent),
            "decoder": (self.inputs, self.hidden),
        }
        found: dict[str, tuple[int, ...]] = {}
        for name, (outputs, inputs) in layers.items():
            found |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
        return found

    @property
    def numbers(self) -> int:
        """P = 2 d h + 3 h l + 2 h + 2 l + d, the weights of one autoencoder."""
        return sum(map(prod, self.shapes.values()))

    def parts(self, weights: torch.Tensor) -> Parts:
        """Views of weights (c, P), (c, ...) each."""
        pieces = weights.split([prod(shape) for shape in self.shapes.values()], dim=1)
        return {
            name: piece.unflatten(1, shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def initial(self, keys: torch.Tensor) -> torch.Tensor:
        """New weights (c, P) for keys (c,): uniform within 1/sqrt(fan-in), biases too, as in torch's own layers."""
        bounds = torch.cat(
            [
                torch.full((prod(shape),), self.shapes[name.replace("bias", "weight")][1] ** -0.5)
                for name, shape in self.shapes.items()
            ]
        )
        return (2 * uniforms(keys, self.numbers) - 1) * bounds.to(keys.device)


def _linear(parts: Parts, name: str, inputs: torch.Tensor) -> torch.Tensor:
    return torch.baddbmm(parts[f"{name}.bias"].unsqueeze(1), inputs, parts[f"{name}.weight"].transpose(1, 2))


def encode(parts: Parts, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """m and v (c, b, l) of the posteriors of `inputs` (c, b, d)."""
    hidden = _linear(parts, "encoder", inputs).tanh()
    return _linear(parts, "mean", hidden), _linear(parts, "log_variance", hidden)


def decode(parts: Parts, latents: torch.Tensor) -> torch.Tensor:
    """x^ (c, b, d) of `latents` (c, b, l)."""
    return _linear(parts, "decoder", _linear(parts, "expander", latents).tanh()).sigmoid()


def divergence(
    mean: torch.Tensor,
    log_variance: torch.Tensor,
    other_mean: torch.Tensor | None = None,
    other_log_variance: torch.Tensor | None = None,
) -> torch.Tensor:
    """KL(N(m, e^v) || N(m', e^v')) (...) of diagonal Gaussians (..., l); the second is N(0, I) if left out."""
    if other_mean is None or other_log_variance is None:
        return (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=-1) / 2
    apart = (log_variance.exp() + (mean - other_mean).square()) * (-other_log_variance).exp()
    return (other_log_variance - log_variance - 1 + apart).sum(dim=-1) / 2


def losses(
    parts: Parts, inputs: torch.Tensor, noise: torch.Tensor | None, weight: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """|x^ - x|^2 + weight KL(q(z | x) || N(0, I)) of each sample (c, b), with m and v (c, b, l).

    Args:
        parts: the weights of the autoencoders.
        inputs: (c, b, d).
        noise: (c, b, l) standard normal, for z = m + e^(v / 2) noise; None: z = m.
        weight: the weight of the divergence.
    """
    mean, log_variance = encode(parts, inputs)
    latents = mean if noise is None else mean + (log_variance / 2).exp() * noise
    apart = (decode(parts, latents) - inputs).square().sum(dim=2)
    return apart + weight * divergence(mean, log_variance), mean, log_variance


@dataclass
class Bank:
    """The weights of the classes that have an autoencoder.

    Attributes:
        columns: (k,) int64 of the classes, ascending.
        weights: (k, P) float32.
    """

    state: ClassVar[Sequence[str]] = ("columns", "weights")

    columns: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def empty(cls, numbers: int, device: torch.device) -> Bank:
        """A bank without a class; `numbers` is P."""
        return cls(torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, numbers, device=device))

    def has(self, columns: torch.Tensor) -> torch.Tensor:
        """(c,) which of these classes have an autoencoder."""
        return torch.isin(columns, self.columns)

    def at(self, columns: torch.Tensor) -> torch.Tensor:
        """The weights (c, P) of these classes, all of which have an autoencoder."""
        return self.weights[torch.searchsorted(self.columns, columns)]

    def updated(self, columns: torch.Tensor, weights: torch.Tensor) -> Bank:
        """A bank with these weights (c, P) for these classes (c,), some of which may be new."""
        stay = ~torch.isin(self.columns, columns)
        found = torch.cat([self.columns[stay], columns])
        order = found.argsort()
        return Bank(found[order], torch.cat([self.weights[stay], weights])[order])
