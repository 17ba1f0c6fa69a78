"""Images from gradients: find the image that has a given gradient, min_x ||gradient(x) - gradient||^2.

Deep leakage from gradients (Zhu, Liu, Han, NeurIPS 2019), with the label read off first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fcl_bench.environment import exact_kernels
from fcl_bench.methods.exemplars.inversion.encoder import Factors, GradientEncoder
from fcl_bench.methods.exemplars.inversion.lbfgs import BatchedLBFGS
from fcl_bench.tracking.console import progress

#: The most numbers in the history of the problems that run at a time.
_ROOM = 2**26
#: Iterations from image to image, as in a step of torch's L-BFGS.
INNER = 20


@dataclass(frozen=True)
class Reconstruction:
    """What P gradients reveal.

    Attributes:
        images: (P, last, 3, h, w) the last iterates, the final one at the end; pixels may leave 0..1.
        labels: (P,) columns.
        losses: (P,) || gradient(x) - gradient ||^2 at the final one.
    """

    images: torch.Tensor
    labels: torch.Tensor
    losses: torch.Tensor


def reconstruct(
    encoder: GradientEncoder,
    gradients: torch.Tensor,
    seed: int,
    rate: float,
    iterations: int = 250,
    last: int = 20,
    inner: int = INNER,
) -> Reconstruction:
    """Minimise the distance of gradients by L-BFGS from a normal random image, for each gradient alone.

    Args:
        encoder: over which the samples were differentiated.
        gradients: (P, p).
        seed: of the random images.
        rate: step size; GLFC's code has 0.1, FedProTIP's runs of it 0.5 and 0.1.
        iterations: images that are looked at, one after the other.
        last: how many of them are returned.
        inner: iterations of L-BFGS from one image to the next.
    """
    height, width = encoder.shape
    labels = encoder.labels(gradients)
    if not len(gradients):
        return Reconstruction(gradients.new_empty(0, last, 3, height, width), labels, gradients.new_empty(0))
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn((len(gradients), 3 * height * width), generator=generator, dtype=torch.float64).to(gradients)
    history = min(100, iterations * inner)
    at_once = max(1, _ROOM // (2 * history * start.shape[1]))
    wanted = encoder.factorised(gradients)
    groups = torch.arange(len(gradients), device=gradients.device).split(at_once)
    images, losses = [], []
    with progress(len(groups) * iterations, f"reconstructing {len(gradients)} images", "step") as bar:
        for chosen in groups:
            found, left = _descend(
                encoder, wanted[chosen], labels[chosen], start[chosen], rate, iterations, last, inner, bar.update
            )
            images.append(found)
            losses.append(left)
    return Reconstruction(torch.cat(images), labels, torch.cat(losses))


def _descend(
    encoder: GradientEncoder,
    wanted: Factors,
    labels: torch.Tensor,
    start: torch.Tensor,
    rate: float,
    iterations: int,
    last: int,
    inner: int,
    on_start: Callable[[], object],
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (3, *encoder.shape)

    def evaluate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad(), exact_kernels():
            x = x.detach().requires_grad_()
            losses = encoder.factors(x.unflatten(1, shape), labels).distances(wanted)
            (slopes,) = torch.autograd.grad(losses.sum(), x)
        return losses.detach(), slopes

    solver = BatchedLBFGS(start, evaluate, rate)
    images = []
    for iteration in range(iterations):
        solver.iterate(inner)
        on_start()
        if iteration >= iterations - last:
            images.append(solver.x.unflatten(1, shape))
    losses = solver.iterate(0)
    # The final point may be one that was never looked at.
    images[-1] = solver.x.unflatten(1, shape)
    return torch.stack(images, dim=1), losses


def pixel_bytes(pixels: torch.Tensor, wrap: bool = False) -> torch.Tensor:
    """Images in uint8: pixels outside 0..1 are cut off, or wrap round as in PIL, which keeps x 255 modulo 256."""
    scaled = pixels.detach().double() * 255
    if wrap:
        return scaled.trunc().remainder(256).to(torch.uint8)
    return scaled.clamp(0, 255).round().to(torch.uint8)
