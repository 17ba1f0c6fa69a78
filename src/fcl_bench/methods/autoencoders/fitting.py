"""Training the autoencoders of several classes side by side, each on its own samples and by its own random stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from fcl_bench.linalg.tensors import all_finite
from fcl_bench.methods.autoencoders import networks
from fcl_bench.protocol import compute
from fcl_bench.training.knobs import diverged

if TYPE_CHECKING:
    from fcl_bench.methods.autoencoders.fedcbc import FedCBC, VAETraining

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
        weight: (c,) alpha of each class; 0: it has no such posteriors.
    """

    mean: torch.Tensor
    log_variance: torch.Tensor
    weight: torch.Tensor


def posteriors(
    architecture: networks.Architecture, weights: torch.Tensor, samples: Grouped
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and log-variance (N, l) of every sample under the autoencoder of its class.

    Args:
        weights: (c, P).
        samples: of the c classes.
    """
    inputs, counts = samples
    compute.count(forward=len(inputs))
    parts, first = architecture.parts(weights), samples.first
    mean, log_variance = (inputs.new_empty(len(inputs), architecture.latent) for _ in range(2))
    for begin in range(0, int(counts.max()), _ROWS):
        places = torch.arange(begin, begin + _ROWS, device=inputs.device)
        there = places < counts.unsqueeze(1)
        rows = (first.unsqueeze(1) + places).clamp(max=len(inputs) - 1)
        for own, found in zip((mean, log_variance), networks.encode(parts, inputs[rows]), strict=True):
            own[rows[there]] = found[there]
    return mean, log_variance


def fitted(
    architecture: networks.Architecture,
    weights: torch.Tensor,
    samples: Grouped,
    method: FedCBC,
    keys: torch.Tensor,
    wanted: Wanted | None = None,
) -> torch.Tensor:
    """The weights (c, P) after training. A class's loss is the mean over its batch, and each has its own Adam.

    The loss of a sample is |x^ - x|^2 + kl KL(q || N(0, I)), and alpha KL(q || wanted) if one is wanted.

    Args:
        weights: (c, P) to start from; they stay as they are.
        samples: of the c classes, at least one each.
        keys: (c,) keys of the classes' random streams.
        wanted: posteriors to be held to.

    Raises:
        UserError: the training diverged.
    """
    # Classes with many samples come first, so those that still have a batch in a step are the first ones.
    order = samples.counts.argsort(descending=True, stable=True)
    counts, first, keys = samples.counts[order], samples.first[order], keys[order]
    weights = weights[order].clone()
    if wanted is not None:
        wanted = wanted._replace(weight=wanted.weight[order])
    size, sizes = method.training.batch_size, counts.tolist()
    adam = _Adam(weights, method.training)
    epochs = method.training.epochs
    compute.count(steps=epochs * sum(-(-own // size) for own in sizes), trained=epochs * sum(sizes))
    for epoch in range(epochs):
        of_epoch = networks.further(keys, epoch)
        shuffled = (first.unsqueeze(1) + networks.orders(of_epoch, counts)).clamp(max=len(samples.inputs) - 1)
        for step, begin in enumerate(range(0, sizes[0], size)):
            active = sum(count > begin for count in sizes)
            rows = shuffled[:active, begin : begin + size]
            there = torch.arange(begin, begin + rows.shape[1], device=rows.device) < counts[:active].unsqueeze(1)
            share = there / there.sum(dim=1, keepdim=True)
            parts = {name: own.detach().requires_grad_() for name, own in architecture.parts(weights[:active]).items()}
            loss = _loss(parts, rows, samples, method.kl, networks.further(of_epoch[:active], step), wanted)
            gradients = torch.autograd.grad((share * loss).sum(), list(parts.values()))
            adam.step(torch.cat([gradient.flatten(1) for gradient in gradients], dim=1))
    if not all_finite(weights):
        raise diverged("method.training", method.training.lr, method.training.weight_decay)
    return torch.empty_like(weights).index_copy_(0, order, weights)


def _loss(
    parts: networks.Parts,
    rows: torch.Tensor,
    samples: Grouped,
    kl: float,
    keys: torch.Tensor,
    wanted: Wanted | None,
) -> torch.Tensor:
    """The loss (a, b) of each sample of a step; `rows` (a, b) are the samples' places."""
    shape = (*rows.shape, parts["mean.bias"].shape[1])
    noise = networks.normals(keys, shape[1] * shape[2]).view(shape)
    loss, mean, log_variance = networks.losses(parts, samples.inputs[rows], noise, kl)
    if wanted is None:
        return loss
    apart = networks.divergence(mean, log_variance, wanted.mean[rows], wanted.log_variance[rows])
    return loss + wanted.weight[: len(rows), None] * apart


class _Adam:
    """Adam with a number of steps of its own for each row, in place.

    Args:
        weights: (c, P).
    """

    def __init__(self, weights: torch.Tensor, knobs: VAETraining) -> None:
        self._weights, self._knobs = weights, knobs
        self._first, self._second = torch.zeros_like(weights), torch.zeros_like(weights)
        self._steps = torch.zeros(len(weights), 1, dtype=torch.float64, device=weights.device)

    def step(self, gradient: torch.Tensor) -> None:
        """Make a step of the first a rows by their gradients (a, P)."""
        count = len(gradient)
        weights, first, second = (own[:count] for own in (self._weights, self._first, self._second))
        steps = self._steps[:count].add_(1)
        gradient = gradient.add(weights, alpha=self._knobs.weight_decay)
        first.lerp_(gradient, 1 - _BETA1)
        second.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        rate = (self._knobs.lr / (1 - _BETA1**steps)).to(weights.dtype)
        root = (1 - _BETA2**steps).sqrt().to(weights.dtype)
        weights.sub_(rate * first / ((second.sqrt() / root).add_(_EPSILON)))


def latents_of(method: FedCBC, keys: torch.Tensor) -> torch.Tensor:
    """(c, samples, l) latents of the prior for keys (c,)."""
    return networks.normals(keys, method.samples * method.latent).unflatten(1, (method.samples, method.latent))


def fused(
    architecture: networks.Architecture,
    teachers: torch.Tensor,
    counts: torch.Tensor,
    known: torch.Tensor,
    method: FedCBC,
    keys: torch.Tensor,
) -> torch.Tensor:
    """One autoencoder of each class (c, P).

    A single teacher is taken as it is. Several teachers make the same number of samples each, and an autoencoder is
    trained on all of them, held to the mean of the teachers' posteriors. It starts from the last teacher if the class
    was known before, else from one chosen at random.

    Args:
        teachers: (T, P), sorted by class.
        counts: (c,) how many teachers each class has.
        known: (c,) whether the class's last teacher is the autoencoder known so far.
        keys: (c,) keys of the classes' random streams.
    """
    first = counts.cumsum(0) - counts
    new = teachers[first].clone()
    several = (counts > 1).nonzero().squeeze(1)
    if not len(several):
        return new
    counts, first, keys = counts[several], first[several], keys[several]
    chosen = (networks.uniforms(networks.further(keys, 0), 1).squeeze(1) * counts).long().clamp(max=counts - 1)
    start = teachers[first + torch.where(known[several], counts - 1, chosen)]
    # The teachers of these classes alone, one class after the other.
    own = torch.repeat_interleave(first - (counts.cumsum(0) - counts), counts)
    own = own + torch.arange(len(own), device=own.device)
    latents = latents_of(method, networks.further(keys, 1)).repeat_interleave(counts, dim=0)
    made = networks.decode(architecture.parts(teachers[own]), latents)
    samples = Grouped(made.flatten(0, 1), counts * method.samples)
    wanted = _averaged(architecture, teachers, first, counts, samples, method) if method.alpha else None
    new[several] = fitted(architecture, start, samples, method, networks.further(keys, 2), wanted)
    return new


def _averaged(
    architecture: networks.Architecture,
    teachers: torch.Tensor,
    first: torch.Tensor,
    counts: torch.Tensor,
    samples: Grouped,
    method: FedCBC,
) -> Wanted:
    """The mean over a class's teachers of their posteriors' means and log-variances, for each sample of the class.

    Args:
        architecture, teachers, samples, method: as of `fused`.
        first, counts: (c,) where the teachers of each class begin, and their number.
    """
    share = (1 / counts).repeat_interleave(samples.counts).unsqueeze(1)
    mean, log_variance = (samples.inputs.new_zeros(len(samples.inputs), architecture.latent) for _ in range(2))
    for place in range(int(counts.max())):
        # For a class with fewer teachers its last one is taken again, with weight 0.
        counted = (place < counts).repeat_interleave(samples.counts).unsqueeze(1)
        m, v = posteriors(architecture, teachers[first + (counts - 1).clamp(max=place)], samples)
        mean += torch.where(counted, m, 0)
        log_variance += torch.where(counted, v, 0)
    return Wanted(mean * share, log_variance * share, torch.full_like(counts, 1).float() * method.alpha)
