"""Steps of softmax regression on samples that are drawn from Gaussian classes, from a ridge regression on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

import torch

from fcl_bench.methods.closed_form.algebra.random_features import OwnCovariances

#: No more samples of a class are drawn in a step, so that a lying count costs no time; each then counts for several.
_MOST = 500
#: How long a step is at first. Boehning's bound on the curvature, p (1 - p) <= 1/4, makes steps of 2 safe; a class that
#: is nearly certain or nearly out of the question has far less curvature.
_LENGTH = 16.0
#: What the scores of a ridge regression may have to be multiplied by to be those of a softmax.
_SHARPER = [2.0**power for power in range(-10, 31)]

#: The random features (n, M) of samples of one class, its column, and how many samples each of them stands for.
Drawn = tuple[torch.Tensor, int, float]


class DrawnClasses:
    """The classes of all tasks so far as N(mu, b Sigma + L L') in the backbone's features.

    Attributes:
        columns, sizes: (E,) the class and the number of samples of each entry; a class that comes back has several.
        means: (E, d).
        shares, factors: (E,) b and (E, d, k) L.
    """

    state: ClassVar[Sequence[str]] = ("columns", "sizes", "means", "shares", "factors")

    def __init__(self, like: torch.Tensor, rank: int) -> None:
        self.columns = torch.zeros(0, dtype=torch.int64, device=like.device)
        self.sizes = self.columns
        self.means, self.shares = like.new_zeros(0, len(like)), like.new_zeros(0)
        self.factors = like.new_zeros(0, len(like), rank)

    def add(self, columns: torch.Tensor, sizes: torch.Tensor, means: torch.Tensor, own: OwnCovariances) -> None:
        """Add the classes of a task; `means` is (d, c)."""
        held = sizes > 0
        more = (columns, sizes.to(self.sizes), means.T, own.shares, own.factors)
        for name, part in zip(self.state, more, strict=True):
            setattr(self, name, torch.cat([getattr(self, name), part[held]]))

    def draw(self, Sigma: torch.Tensor, seed: int) -> Iterator[tuple[torch.Tensor, int, float]]:
        """Samples Z (n, d) of each entry, with its column and what each sample counts for, about sizes / n."""
        rng = torch.Generator().manual_seed(seed)
        values, V = torch.linalg.eigh(Sigma.double())
        root = (V * values.clamp_min(0).sqrt()).T.to(Sigma)
        entries = zip(self.columns.tolist(), self.sizes.tolist(), self.means, self.shares, self.factors, strict=True)
        for column, size, mean, share, L in entries:
            n = min(size, _MOST)
            normal = torch.randn(n, len(Sigma) + L.shape[1], generator=rng, dtype=torch.float64).to(Sigma)
            common, own = normal.split([len(Sigma), L.shape[1]], dim=1)
            yield mean + share.sqrt() * (common @ root) + own @ L.T, column, size / n


def softmax_steps(
    W: torch.Tensor,
    solve: Callable[[torch.Tensor], torch.Tensor],
    draw: Callable[[int], Iterable[Drawn]],
    steps: int,
) -> torch.Tensor:
    """W after some steps down the loss of softmax regression, each on samples of its own.

    The loss is the sum over samples of -log softmax(W'h)[y], and its Hessian is at most (1/2) (I - 11'/C) x G (Boehning
    1992). So steps of the form

        W <- W - length (G + lambda I)^-1 sum of h (softmax(W'h) - e_y)'

    descend if `length` is at most 2. The first is longer; where the loss has risen, the step is taken back and tried at
    half its length. Before the first step W is multiplied by the power of two for which the loss is least.

    Args:
        W: (M, C), whose scores have the right proportions.
        solve: X of (G + lambda I) X = its argument (M, C).
        draw: the samples of step k, 0 to `steps`.
    """
    losses = W.new_zeros(len(_SHARPER), dtype=torch.float64)
    for H, column, weight in draw(0):
        scores = H @ W
        losses += weight * torch.stack([_loss(scores * sharper, column) for sharper in _SHARPER])
    W = W * _SHARPER[int(losses.argmin())]
    before, direction, least, length = W, torch.zeros_like(W), math.inf, _LENGTH
    for step in range(1, steps + 1):
        gradient, loss = torch.zeros_like(W), 0.0
        for H, column, weight in draw(step):
            scores = H @ W
            loss += weight * float(_loss(scores, column))
            p = scores.softmax(dim=1)
            p[:, column] -= 1
            gradient.addmm_(H.T, p, alpha=weight)
        if loss > least:
            length /= 2
        else:
            before, direction, least = W, solve(gradient), loss
        W = before - length * direction
    return W


def _loss(scores: torch.Tensor, column: int) -> torch.Tensor:
    """The sum of -log softmax(scores)[column] over the rows, in float64."""
    return (scores.logsumexp(dim=1) - scores[:, column]).double().sum()
