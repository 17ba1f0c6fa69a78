"""LGA's monitor: accuracy on features around those of reconstructed images, at a radius that clients' sums tell."""

from __future__ import annotations

import torch

from fcl_bench.linalg.gram import class_sums

#: New features for each given one, and the share of the variance that noise may reach.
_COUNT, _SHARE = 5, 0.1
#: Draws of a noise that is too long, before it is shortened instead.
_ATTEMPTS = 10


def class_statistics(
    features: torch.Tensor, labels: torch.Tensor, columns: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a client says of each class: n, sum phi and sum phi * phi, which add up over clients.

    Args:
        features: (n, d) phi.
        labels: (n,) columns, all in `columns`.
        columns: (c,) ascending.

    Returns:
        (c,) int64, (c, d) and (c, d) in float64: 4 (2 d + 1) bytes of each class as int32 and float32.
    """
    phi = features.double()
    which = torch.searchsorted(torch.tensor(columns, device=labels.device), labels)
    counts = torch.bincount(which, minlength=len(columns))
    return counts, class_sums(phi, which, len(columns)).T, class_sums(phi.square(), which, len(columns)).T


def radius_of(counts: torch.Tensor, sums: torch.Tensor, squares: torch.Tensor) -> float:
    """sqrt of the mean over classes of trace(cov) / d, cov with n - 1; of the classes with two samples or more.

    Args:
        counts, sums, squares: as `class_statistics` returns them, added up over clients.

    Returns:
        0 if no class has two samples.
    """
    known = counts > 1
    if not bool(known.any()):
        return 0.0
    n, total, second = counts[known].double()[:, None], sums[known].double(), squares[known].double()
    # Rounding on the wire may make it negative.
    variances = ((second - total.square() / n) / (n - 1)).mean(dim=1).clamp(min=0)
    return float(variances.mean().sqrt())


def augmented_features(
    features: torch.Tensor, labels: torch.Tensor, radius: float, seed: int, published: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Five features phi + radius e around each phi, e ~ N(0, diag var_c), |radius e|^2 at most a tenth of sum var_c.

    Noise that is longer is drawn again. If the radius is above sqrt(1/10), hardly any noise is short enough, and the
    published code draws for ever. Here the noise is shortened to the limit after ten draws; in many dimensions almost
    all short noise has that length.

    Args:
        features: (n, d) phi of the monitor's images.
        labels: (n,) their columns c; var_c (d,) is of the features of c, with n - 1, and 0 of a single one.
        radius: see `radius_of`.
        seed: of the noise.
        published: as in LGA's code, var_c * var_c is the standard deviation, and its sum's tenth the limit.

    Returns:
        (5 n, d) in the features' type and (5 n,) labels, those of one phi after those of the other.
    """
    phi = features.double()
    _, which = labels.unique(return_inverse=True)
    classes = int(which.max()) + 1
    counts = torch.bincount(which, minlength=classes)[:, None]
    centred = phi - (class_sums(phi, which, classes).T / counts)[which]
    variances = class_sums(centred.square(), which, classes).T / (counts - 1).clamp(min=1)
    deviations, limits = variances.sqrt(), variances.sum(dim=1)
    if published:
        deviations, limits = variances.square(), variances.square().sum(dim=1)
    each = which.repeat_interleave(_COUNT)
    scale, limit = radius * deviations[each], _SHARE * limits[each]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.full_like(scale, torch.inf)
    for _ in range(_ATTEMPTS):
        long = ~(noise.square().sum(dim=1) <= limit)
        if not bool(long.any()):
            break
        drawn = torch.randn(tuple(noise.shape), generator=generator, dtype=torch.float64).to(noise.device)
        noise = torch.where(long[:, None], scale * drawn, noise)
    lengths = noise.square().sum(dim=1)
    noise = noise * torch.where(lengths > limit, (limit / lengths).sqrt(), 1.0)[:, None]
    return (phi.repeat_interleave(_COUNT, dim=0) + noise).to(features.dtype), labels.repeat_interleave(_COUNT)
