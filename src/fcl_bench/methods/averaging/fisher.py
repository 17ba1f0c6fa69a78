"""The diagonal of a network's Fisher information, as sums over samples of squared gradients of the log probability."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fcl_bench.environment import exact_kernels
from fcl_bench.protocol import compute
from fcl_bench.training.network import Network
from fcl_bench.training.trainer import forward_batch

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
    standardise: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """S = sum_x (d log p(y|x) / d theta)^2 of each parameter in `names`, in float64; evaluation mode, float32.

    Each gradient is of one sample; at most `HELD_BYTES` of them are held at once. If only heads are requested,
    no gradient is made: those of a linear layer are outer products, so S = (g^2)' (z^2).

    Args:
        names: of parameters.
        samples: (n, ...) as clients hold them.
        labels: (n,) each sample's class, as a position among the `competing` logits.
        competing: (c,) the logits of which p is the softmax; None: all.
        standardise: samples -> what the network sees.
    """
    own = dict(network.named_parameters())
    sums = {name: torch.zeros_like(own[name], dtype=torch.float64) for name in names}
    if all(name.startswith("heads.") for name in names):
        squares, size = _of_heads, forward_batch(samples.device)
    else:
        squares, size = _of_network, chunk_size([own[name] for name in names], samples.device)
    chosen = slice(None) if competing is None else competing.to(samples.device)
    network.eval()
    compute.count(trained=len(samples))
    # The fused attention kernels know no batches of gradients.
    with torch.no_grad(), exact_kernels(), compute.uncounted(), sdpa_kernel(SDPBackend.MATH):
        for batch, classes in zip(samples.split(size), labels.split(size), strict=True):
            for name, value in squares(network, names, chosen, standardise(batch).contiguous(), classes).items():
                sums[name].add_(value)
    return sums


def chunk_size(parameters: list[torch.nn.Parameter], device: torch.device) -> int:
    """How many samples' gradients are made at once."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    each = 4 * max(1, sum(parameter.numel() for parameter in parameters))
    return max(1, min(HELD_SAMPLES[kind], HELD_BYTES[kind] // each))


def _of_network(
    network: Network, names: list[str], competing: slice | torch.Tensor, seen: torch.Tensor, labels: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Squares of a batch for any parameters: one gradient per sample, by torch's vectorised differentiation."""
    own = dict(network.named_parameters())
    parameters = {name: own[name].detach().contiguous() for name in names}

    def log_probability(parameters: dict[str, torch.Tensor], sample: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        scores = functional_call(network, parameters, (sample.unsqueeze(0),))[:, competing]
        return scores.log_softmax(dim=1).gather(1, label.reshape(1, 1)).sum()

    gradients = vmap(grad(log_probability), in_dims=(None, 0, 0))(parameters, seen, labels)
    return {name: value.square_().sum(dim=0) for name, value in gradients.items()}


def _of_heads(
    network: Network, names: list[str], competing: slice | torch.Tensor, seen: torch.Tensor, labels: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Squares for heads alone, in float64: g = onehot(y) - p is the gradient in a sample's logits, z its features."""
    features = network.body(seen).double()
    squares = network.logits(features.float()).double()
    probabilities = squares[:, competing].softmax(dim=1)
    found = (torch.nn.functional.one_hot(labels, probabilities.shape[1]) - probabilities) ** 2
    squares.zero_()[:, competing] = found
    by_name: dict[str, torch.Tensor] = {}
    for head, part in enumerate(squares.split([head.out_features for head in network.heads], dim=1)):
        by_name[f"heads.{head}.weight"] = part.T @ features.square()
        by_name[f"heads.{head}.bias"] = part.sum(dim=0)
    return {name: by_name[name] for name in names}
