"""Training the autoencoders of several classes side by side, each on its own samples and by its own random stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fcl_bench.methods.autoencoders.class_vaes.networks import Architecture, Parts, divergence, encode, losses
from fcl_bench.methods.autoencoders.class_vaes.streams import further, normals, orders

#: Adam's constants, as in torch.
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
#: The number of samples of each class whose posteriors are computed at once.
_ROWS = 256


class Grouped(NamedTuple):
    """Samples, sorted by class.

    Attributes:
        inputs: (N, d) float32.
        counts: (c,) the number of samples of each class, in the order in which the classes lie in `inputs`.
    """

    inputs: torch.Tensor
    counts: torch.Tensor

    @property
    def first(self) -> torch.Tensor:
        """(c,) where the samples of each class begin."""
        return self.counts.cumsum(0) - self.counts


class Wanted(NamedTuple):
    """Posteriors that the samples should have, and the weight of that.

    Attributes:
        mean, log_variance: (N, l) of the samples' posteriors.
        spread: (N, l) standard deviation of noise that is added to the mean anew at every step; None: no noise.
        weight: (c,) alpha of each class; 0: it has no such posteriors.
    """

    mean: torch.Tensor
    log_variance: torch.Tensor
    spread: torch.Tensor | None
    weight: torch.Tensor


@dataclass(frozen=True)
class Fit:
    """How to train.

    Attributes:
        epochs: passes over a class's samples.
        batch_size: samples per class and step.
        lr, weight_decay: of Adam, which adds the decay to the gradients.
        kl: weight of the divergence from the prior.
    """

    epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    kl: float


def posteriors(
    architecture: Architecture, weights: torch.Tensor, samples: Grouped
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and log-variance (N, l) of every sample under the autoencoder of its class.

    Args:
        architecture: of the autoencoders.
        weights: (c, P).
        samples: of the c classes.
    """
    inputs, counts = samples
    parts, first = architecture.parts(weights), samples.first
    mean, log_variance = (inputs.new_empty(len(inputs), architecture.latent) for _ in range(2))
    for begin in range(0, int(counts.max()), _ROWS):
        places = torch.arange(begin, begin + _ROWS, device=inputs.device)
        there = places < counts.unsqueeze(1)
        rows = (first.unsqueeze(1) + places).clamp(max=len(inputs) - 1)
        for own, found in zip((mean, log_variance), encode(parts, inputs[rows]), strict=True):
            own[rows[there]] = found[there]
    return mean, log_variance


def fitted(
    architecture: Architecture,
    weights: torch.Tensor,
    samples: Grouped,
    fit: Fit,
    keys: torch.Tensor,
    wanted: Wanted | None = None,
) -> torch.Tensor:
    """The weights (c, P) after training. A class's loss is the mean over its batch, and each has its own Adam.

    The loss of a sample is |x^ - x|^2 + `fit.kl` KL(q || N(0, I)), and alpha KL(q || wanted) if one is wanted.

    Args:
        architecture: of the autoencoders.
        weights: (c, P) to start from; they stay as they are.
        samples: of the c classes, at least one each.
        fit: how to train.
        keys: (c,) keys of the classes' random streams.
        wanted: posteriors to be held to.
    """
    # Classes with many samples come first, so those that still have a batch in a step are the first ones.
    order = samples.counts.argsort(descending=True, stable=True)
    counts, first, keys = samples.counts[order], samples.first[order], keys[order]
    weights = weights[order].clone()
    alpha = None if wanted is None else wanted.weight[order]
    size, sizes = fit.batch_size, counts.tolist()
    adam = _Adam(weights, fit)
    for epoch in range(fit.epochs):
        of_epoch = further(keys, epoch)
        shuffled = (first.unsqueeze(1) + orders(of_epoch, counts)).clamp(max=len(samples.inputs) - 1)
        for step, begin in enumerate(range(0, sizes[0], size)):
            active = sum(count > begin for count in sizes)
            rows = shuffled[:active, begin : begin + size]
            there = torch.arange(begin, begin + rows.shape[1], device=rows.device) < counts[:active].unsqueeze(1)
            share = there / there.sum(dim=1, keepdim=True)
            parts = {name: own.detach().requires_grad_() for name, own in architecture.parts(weights[:active]).items()}
            loss = _loss(parts, rows, samples, fit.kl, further(of_epoch[:active], step), wanted, alpha)
            gradients = torch.autograd.grad((share * loss).sum(), list(parts.values()))
            adam.step(torch.cat([gradient.flatten(1) for gradient in gradients], dim=1))
    return torch.empty_like(weights).index_copy_(0, order, weights)


def _loss(
    parts: Parts,
    rows: torch.Tensor,
    samples: Grouped,
    kl: float,
    keys: torch.Tensor,
    wanted: Wanted | None,
    alpha: torch.Tensor | None,
) -> torch.Tensor:
    """The loss (a, b) of each sample of a step; `rows` (a, b) are the samples' places."""
    shape = (*rows.shape, parts["mean.bias"].shape[1])
    noise = normals(keys, shape[1] * shape[2]).view(shape)
    loss, mean, log_variance = losses(parts, samples.inputs[rows], noise, kl)
    if wanted is None or alpha is None:
        return loss
    target = wanted.mean[rows]
    if wanted.spread is not None:
        target = target + wanted.spread[rows] * normals(further(keys, 0), shape[1] * shape[2]).view(shape)
    return loss + alpha[: len(rows), None] * divergence(mean, log_variance, target, wanted.log_variance[rows])


class _Adam:
    """Adam with a number of steps of its own for each row, in place.

    Args:
        weights: (c, P).
        fit: step size and decay.
    """

    def __init__(self, weights: torch.Tensor, fit: Fit) -> None:
        self._weights, self._fit = weights, fit
        self._first, self._second = torch.zeros_like(weights), torch.zeros_like(weights)
        self._steps = torch.zeros(len(weights), 1, dtype=torch.float64, device=weights.device)

    def step(self, gradient: torch.Tensor) -> None:
        """Make a step of the first a rows by their gradients (a, P)."""
        count = len(gradient)
        weights, first, second = (own[:count] for own in (self._weights, self._first, self._second))
        steps = self._steps[:count].add_(1)
        gradient = gradient.add(weights, alpha=self._fit.weight_decay)
        first.lerp_(gradient, 1 - _BETA1)
        second.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        rate = (self._fit.lr / (1 - _BETA1**steps)).to(weights.dtype)
        root = (1 - _BETA2**steps).sqrt().to(weights.dtype)
        weights.sub_(rate * first / ((second.sqrt() / root).add_(_EPSILON)))
