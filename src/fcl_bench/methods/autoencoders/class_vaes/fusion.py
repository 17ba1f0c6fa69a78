"""Samples drawn from autoencoders, and one autoencoder of a class made of several."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fcl_bench.methods.autoencoders.class_vaes.fitting import Fit, Grouped, Wanted, fitted, posteriors
from fcl_bench.methods.autoencoders.class_vaes.networks import Architecture, decode
from fcl_bench.methods.autoencoders.class_vaes.streams import further, normals, uniforms


@dataclass(frozen=True)
class Drawing:
    """How samples are drawn.

    Attributes:
        count: the number of samples from each autoencoder.
        published: latents are uniform within -1 and 1, not from the prior, and z takes the place of a posterior's mean.
    """

    count: int
    published: bool

    def latents(self, keys: torch.Tensor, latent: int) -> torch.Tensor:
        """(c, count, l) latents for keys (c,)."""
        draw = uniforms if self.published else normals
        found = draw(keys, self.count * latent).unflatten(1, (self.count, latent))
        return 2 * found - 1 if self.published else found


def drawn(architecture: Architecture, weights: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Features (c, n, d) that the decoders of weights (c, P) make of `latents` (c, n, l)."""
    return decode(architecture.parts(weights), latents)


def fused(
    architecture: Architecture,
    teachers: torch.Tensor,
    counts: torch.Tensor,
    known: torch.Tensor,
    fit: Fit,
    alpha: float,
    drawing: Drawing,
    keys: torch.Tensor,
) -> torch.Tensor:
    """One autoencoder of each class (c, P).

    A single teacher is taken as it is. Several teachers make the same number of samples each, and an autoencoder is
    trained on all of them, held to the mean of the teachers' posteriors. It starts from the last teacher if the class
    was known before, else from one chosen at random.

    Args:
        architecture: of the autoencoders.
        teachers: (T, P), sorted by class.
        counts: (c,) how many teachers each class has.
        known: (c,) whether the class's last teacher is the autoencoder known so far.
        fit: how to train.
        alpha: weight of the divergence from the mean posterior; 0: without.
        drawing: how samples are drawn.
        keys: (c,) keys of the classes' random streams.
    """
    first = counts.cumsum(0) - counts
    new = teachers[first].clone()
    several = (counts > 1).nonzero().squeeze(1)
    if not len(several):
        return new
    counts, first, keys = counts[several], first[several], keys[several]
    chosen = (uniforms(further(keys, 0), 1).squeeze(1) * counts).long().clamp(max=counts - 1)
    start = teachers[first + torch.where(known[several], counts - 1, chosen)]
    # The teachers of these classes alone, one class after the other.
    own = torch.repeat_interleave(first - (counts.cumsum(0) - counts), counts)
    own = own + torch.arange(len(own), device=own.device)
    latents = drawing.latents(further(keys, 1), architecture.latent).repeat_interleave(counts, dim=0)
    made = drawn(architecture, teachers[own], latents)
    samples = Grouped(made.flatten(0, 1), counts * drawing.count)
    wanted = _averaged(architecture, teachers, first, counts, samples, alpha, drawing.published) if alpha else None
    new[several] = fitted(architecture, start, samples, fit, further(keys, 2), wanted)
    return new


def _averaged(
    architecture: Architecture,
    teachers: torch.Tensor,
    first: torch.Tensor,
    counts: torch.Tensor,
    samples: Grouped,
    alpha: float,
    at_random: bool,
) -> Wanted:
    """The mean over a class's teachers of their posteriors' means and log-variances, for each sample of the class.

    Args:
        architecture, teachers, samples, alpha: as above.
        first, counts: (c,) where the teachers of each class begin, and their number.
        at_random: hold to the mean of random z, not to the mean of means; the standard deviation is then given, too.
    """
    share = (1 / counts).repeat_interleave(samples.counts).unsqueeze(1)
    mean, log_variance, variance = (samples.inputs.new_zeros(len(samples.inputs), architecture.latent) for _ in "abc")
    for place in range(int(counts.max())):
        # For a class with fewer teachers its last one is taken again, with weight 0.
        counted = (place < counts).repeat_interleave(samples.counts).unsqueeze(1)
        m, v = posteriors(architecture, teachers[first + (counts - 1).clamp(max=place)], samples)
        mean += torch.where(counted, m, 0)
        log_variance += torch.where(counted, v, 0)
        variance += torch.where(counted, v.exp(), 0)
    spread = variance.sqrt() * share if at_random else None
    return Wanted(mean * share, log_variance * share, spread, torch.full_like(counts, 1).float() * alpha)
