"""Which sample of a class stands for it, and how its image is changed before its gradient leaves the client."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

from fcl_bench.linalg.gram import class_sums


def nearest_to_means(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sample of each class whose direction phi / |phi| is nearest to the mean direction of the class.

    The mean is not normalised again, as in GLFC's code. Ties go to the lower index.

    Args:
        features: (n, d) phi.
        labels: (n,) columns.

    Returns:
        (c,) the classes that have samples, ascending, and (c,) the index of each one's sample.
    """
    phi = normalize(features.double(), dim=1)
    columns, which = labels.unique(return_inverse=True)
    counts = torch.bincount(which, minlength=len(columns))
    means = (class_sums(phi, which, len(columns)) / counts).T
    distances = torch.linalg.vector_norm(phi - means[which], dim=1)
    least = distances.new_full((len(columns),), torch.inf).scatter_reduce(0, which, distances, "amin")
    order = torch.arange(len(labels), device=labels.device)
    candidates = torch.where(distances == least[which], order, len(labels))
    first = torch.full_like(columns, len(labels)).scatter_reduce(0, which, candidates, "amin")
    return columns, first


def perturbed(
    images: torch.Tensor,
    targets: torch.Tensor,
    scores: Callable[[torch.Tensor], torch.Tensor],
    steps: int,
    rate: float,
    weight_decay: float,
) -> torch.Tensor:
    """Each image after `steps` of gradient descent on its mean BCE(scores(x), target): towards confidence.

    x <- x - rate (d BCE / d x + weight_decay x), every image for itself. Pixels may leave 0..1.

    Args:
        images: (n, 3, h, w) with pixels from 0 to 1; stay as they are.
        targets: (n, C) one-hot.
        scores: images to logits (n, C), each by itself: a network in evaluation mode.
        steps, rate, weight_decay: GLFC's are 50, a tenth of the learning rate, 1e-5.

    Returns:
        (n, 3, h, w).
    """
    found = images.detach().clone()
    for _ in range(steps):
        found.requires_grad_()
        logits = scores(found)
        # The loss is a mean over classes and a sum over images, so no image depends on how many others there are.
        loss = binary_cross_entropy_with_logits(logits, targets, reduction="sum") / logits.shape[1]
        (slope,) = torch.autograd.grad(loss, found)
        found = (found.detach() * (1 - rate * weight_decay)).sub_(slope, alpha=rate)
    return found.detach()
