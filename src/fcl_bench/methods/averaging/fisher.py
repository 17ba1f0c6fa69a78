"""The diagonal of a network's Fisher information, as sums over samples of squared gradients of the log probability."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fcl_bench.environment import exact_kernels
from fcl_bench.training.network import Network
from fcl_bench.training.trainer import forward_batch

#: Which class y a sample's gradient d log p(y|x) is of: its own; one drawn from p; every one, weighted by p.
LABELS = ("empirical", "sampled", "exact")
#: How many bytes and samples of single-sample gradients are held at once.
HELD_BYTES = {"cuda": 2**31, "cpu": 2**28}
HELD_SAMPLES = {"cuda": 128, "cpu": 32}


def summed_squares(
    network: Network,
    names: list[str],
    samples: torch.Tensor,
    labels: torch.Tensor,
    *,
    competing: torch.Tensor | None,
    kind: str,
    generator: torch.Generator,
    standardise: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """S = sum_x (d log p(y|x) / d theta)^2 of each parameter in `names`, in float64; evaluation mode, float32.

    Each gradient is of one sample; at most `HELD_BYTES` of them are held at once. If only heads are requested,
    no gradient is made: those of a linear layer are outer products, so S = (g^2)' (z^2).

    Args:
        network: with the weights to look at.
        names: of parameters.
        samples: (n, ...) as clients hold them.
        labels: (n,) each sample's class, as a position among the `competing` logits.
        competing: (c,) the logits of which p is the softmax; None: all.
        kind: one of `LABELS`.
        generator: on the CPU, for drawn classes: one number per sample, whatever the size of the batches.
        standardise: samples -> what the network sees.
    """
    own = dict(network.named_parameters())
    sums = {name: torch.zeros_like(own[name], dtype=torch.float64) for name in names}
    uniform = torch.rand(len(samples), generator=generator, dtype=torch.float64)
    if all(name.startswith("heads.") for name in names):
        squares, size = _of_heads, forward_batch(samples.device)
    else:
        squares, size = _of_network, chunk_size([own[name] for name in names], samples.device)
    network.eval()
    # The fused attention kernels know no batches of gradients.
    with torch.no_grad(), exact_kernels(), sdpa_kernel(SDPBackend.MATH):
        for batch, classes, numbers in zip(samples.split(size), labels.split(size), uniform.split(size), strict=True):
            seen = standardise(batch).contiguous()
            for name, value in squares(_Batch(network, names, competing, kind, seen, classes, numbers)):
                sums[name].add_(value)
    return sums


def chunk_size(parameters: list[torch.nn.Parameter], device: torch.device) -> int:
    """How many samples' gradients are made at once."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    each = 4 * max(1, sum(parameter.numel() for parameter in parameters))
    return max(1, min(HELD_SAMPLES[kind], HELD_BYTES[kind] // each))


@dataclass(frozen=True)
class _Batch:
    """What the squares of a batch are made of.

    Attributes:
        network, names, competing, kind: see `summed_squares`.
        seen: (b, ...) what the network sees.
        labels: (b,) as positions among the competing logits.
        uniform: (b,) numbers in 0..1, from which classes are drawn.
    """

    network: Network
    names: list[str]
    competing: torch.Tensor | None
    kind: str
    seen: torch.Tensor
    labels: torch.Tensor
    uniform: torch.Tensor

    def among(self, scores: torch.Tensor) -> torch.Tensor:
        """The logits that compete."""
        return scores if self.competing is None else scores[:, self.competing.to(scores.device)]

    def targets(self, probabilities: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Classes (b,) and their weights (b,), given p (b, c): one pair, or for `exact` one of each class."""
        if self.kind == "exact":
            for column in range(probabilities.shape[1]):
                yield torch.full_like(self.labels, column), probabilities[:, column]
            return
        labels = self.labels
        if self.kind == "sampled":
            below = probabilities.double().cumsum(dim=1) <= self.uniform.to(labels.device).unsqueeze(1)
            labels = below.sum(dim=1).clamp(max=probabilities.shape[1] - 1)
        yield labels, torch.ones_like(probabilities[:, 0])


def _of_network(batch: _Batch) -> Iterator[tuple[str, torch.Tensor]]:
    """Squares for any parameters: one gradient per sample, by torch's vectorised differentiation."""
    network, own = batch.network, dict(batch.network.named_parameters())
    parameters = {name: own[name].detach().contiguous() for name in batch.names}

    def log_probability(
        parameters: dict[str, torch.Tensor], sample: torch.Tensor, label: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        scores = batch.among(functional_call(network, parameters, (sample.unsqueeze(0),)))
        # The root of the weight, since the result is squared.
        return weight.sqrt() * scores.log_softmax(dim=1).gather(1, label.reshape(1, 1)).sum()

    gradients = vmap(grad(log_probability), in_dims=(None, 0, 0, 0))
    probabilities = batch.among(network(batch.seen)).softmax(dim=1)
    for classes, weights in batch.targets(probabilities):
        for name, value in gradients(parameters, batch.seen, classes, weights).items():
            yield name, value.square_().sum(dim=0)


def _of_heads(batch: _Batch) -> Iterator[tuple[str, torch.Tensor]]:
    """Squares for heads alone, in float64: g = onehot(y) - p is the gradient in a sample's logits, z its features."""
    network, competing = batch.network, batch.competing
    features = network.body(batch.seen).double()
    scores = network.logits(features.float()).double()
    probabilities = batch.among(scores).softmax(dim=1)
    squares = torch.zeros_like(probabilities)
    for classes, weights in batch.targets(probabilities):
        squares += weights.unsqueeze(1) * (torch.nn.functional.one_hot(classes, squares.shape[1]) - probabilities) ** 2
    every = scores.zero_()
    every[:, slice(None) if competing is None else competing.to(scores.device)] = squares
    for head, part in enumerate(every.split([head.out_features for head in network.heads], dim=1)):
        found = {f"heads.{head}.weight": part.T @ features.square(), f"heads.{head}.bias": part.sum(dim=0)}
        yield from ((name, value) for name, value in found.items() if name in batch.names)
