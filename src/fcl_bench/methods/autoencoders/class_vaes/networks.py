"""The equations of a variational autoencoder, for many of them at once: their weights are rows of one matrix.

Encoder: h = tanh(W x + b), and the mean m and the log-variance v of z, linear in h.
Decoder: x^ = sigmoid(W' tanh(W'' z + b'') + b').
All functions take a leading dimension of classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from fcl_bench.methods.autoencoders.class_vaes.streams import uniforms

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
