"""One model out of those of a round's clients, in place of their weighted mean, if some may be hostile.

All of these functions look at every model of the round at once, so a server keeps the models until the round is over.
None weighs clients by their samples, since a hostile client would claim the most.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from fcl_bench.training.knobs import Training

Model = Mapping[str, torch.Tensor]


def median(models: Sequence[Model]) -> dict[str, torch.Tensor]:
    """Each coordinate's median (Yin et al., 2018, Definition 1); for an even number the mean of the middle two."""
    low, high = (len(models) - 1) // 2, len(models) // 2
    return _by_coordinate(models, lambda ordered: (ordered[low].double() + ordered[high].double()) / 2)


def trimmed_mean(models: Sequence[Model], share: float) -> dict[str, torch.Tensor]:
    """Each coordinate's mean without its floor(share n) smallest and as many largest values (Yin et al., Definition 2).

    Args:
        models: n of them.
        share: below 1/2.
    """
    cut = trimmed_off(len(models), share)
    return _by_coordinate(models, lambda ordered: ordered[cut : len(ordered) - cut].double().mean(dim=0))


def trimmed_off(models: int, share: float) -> int:
    """How many of the smallest values are left out, and how many of the largest: floor(share n)."""
    # The share is taken as written: 0.3 of 10 clients are 3, though 0.3 in binary is less.
    return int(share * models * (1 + 1e-12))


def krum(models: Sequence[Model], byzantine: int, statistics: Collection[str] = ()) -> int:
    """Which model has the least sum of squared distances to its n - f - 2 nearest others (Blanchard et al., 2017).

    Args:
        models: n of them; with fewer than 2 f + 3 the paper proves nothing, and at least one neighbour counts.
        byzantine: f.
        statistics: the tensors that are no weights. Running means and variances of batch norms lie far apart between
            honest clients, too, and would hide a model whose weights are hostile.

    Returns:
        its number, the first of equals.
    """
    n = len(models)
    neighbours = min(max(n - byzantine - 2, 1), n - 1)
    distances = torch.zeros(n, n, dtype=torch.float64)
    for name in models[0].keys() - set(statistics):
        values = torch.stack([model[name].double().flatten() for model in models])
        # Pair by pair, since a Gram product cancels.
        distances += torch.cdist(values, values, compute_mode="donot_use_mm_for_euclid_dist").square().cpu()
    distances.fill_diagonal_(torch.inf)
    return int(distances.sort(dim=1).values[:, :neighbours].sum(dim=1).argmin())


def combined(
    models: Sequence[Model], kind: str, share: float, byzantine: int, statistics: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """The new model of `kind`, one of `training.knobs.AGGREGATES` but the mean, in float32.

    Args:
        models: of the round's clients, by the same names.
        kind: which.
        share: of trimmed_mean.
        byzantine, statistics: of krum.
    """
    if kind == "krum":
        found: Model = models[krum(models, byzantine, statistics)]
    else:
        found = median(models) if kind == "median" else trimmed_mean(models, share)
    return {name: value.float() for name, value in found.items()}


def weakness(models: int, knobs: Training, key: str) -> str:
    """Why an aggregate of so few models withstands fewer hostile ones than the knobs say; "" where it does not.

    Args:
        models: n.
        knobs: which aggregate, and its knobs.
        key: where the user set them.
    """
    if knobs.aggregate == "krum" and models < 2 * knobs.byzantine + 3:
        return (
            f"{key}.byzantine={knobs.byzantine}: a round had {models} models, and Krum withstands so many hostile ones"
            f" only among {2 * knobs.byzantine + 3} or more"
        )
    if knobs.aggregate == "trimmed_mean" and knobs.trimmed and not trimmed_off(models, knobs.trimmed):
        return (
            f"{key}.trimmed={knobs.trimmed:g}: a round had {models} models, of which this share is none, so that a"
            " single hostile one counts in the mean"
        )
    return ""


def _by_coordinate(models: Sequence[Model], of: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """`of` the values of each coordinate, ascending (n, ...), one tensor after the other."""
    return {name: of(torch.stack([model[name] for model in models]).sort(dim=0).values) for name in models[0]}
