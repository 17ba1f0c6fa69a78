"""A model out of those of a round's clients if some may be hostile, and FedAvgM's and FedAdam's step.

The robust means look at every model of the round at once, so a server keeps the models until the round is over.
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


#: FedAdam's decay of the squares, beta_2, and its adaptivity, tau (Reddi et al., 2021, Algorithm 2).
_SQUARES, _TAU = 0.99, 1e-3


class ServerOptimiser:
    """It makes the new model from the old one and the average of the clients'.

    `momentum`: v <- m v + (average - old), new = old + lr v (FedAvgM). `adam`:
    v <- m v + (1 - m) (average - old), s <- 0.99 s + 0.01 (average - old)^2, new = old + lr v / (sqrt(s) + tau)
    (FedAdam), with tau = 0.001. At first v = 0 and s = tau^2, and no bias is corrected, as in Reddi et al. (2021).
    Running statistics of batch norms are averaged whatever the optimiser.

    Args:
        knobs: `server_optimizer`, `server_lr`, `server_momentum`.

    Attributes:
        velocity, squares: v and s, by name.
    """

    state = ("velocity", "squares")

    def __init__(self, knobs: Training) -> None:
        self._knobs = knobs
        self.velocity: dict[str, torch.Tensor] = {}
        self.squares: dict[str, torch.Tensor] = {}

    def step(
        self,
        old: dict[str, torch.Tensor],
        mean: dict[str, torch.Tensor],
        frozen_rows: Mapping[str, list[int]] | None = None,
    ) -> dict[str, torch.Tensor]:
        """The new model, in float32.

        Args:
            old, mean: of the clients' models, by the same names.
            frozen_rows: by name, rows that do not train: what is known of them stays, and the server gives them their
                values back; None: none.
        """
        kind, momentum, rate = self._knobs.server_optimizer, self._knobs.server_momentum, self._knobs.server_lr
        new = {}
        for name, average in mean.items():
            if ".running_" in name:
                new[name] = average
                continue
            change = average.double() - old[name].double()
            rows = frozen_rows.get(name) if frozen_rows else None
            before = self.velocity.get(name, torch.zeros_like(change))
            if kind == "momentum":
                velocity = step = momentum * before + change
            else:
                known = self.squares.get(name, torch.full_like(change, _TAU**2))
                squares = _SQUARES * known + (1 - _SQUARES) * change.square()
                velocity = momentum * before + (1 - momentum) * change
                step = velocity / (squares.sqrt() + _TAU)
                if rows:
                    squares[rows] = known[rows]
                self.squares[name] = squares
            new[name] = (old[name].double() + rate * step).float()
            if rows:
                velocity[rows] = before[rows]
            self.velocity[name] = velocity
        return new
