"""L-BFGS on many small problems at a time, each with a history of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.linalg import vecdot

#: x (P, n) -> losses (P,) and their gradients (P, n), each row by itself.
Evaluation = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

#: Torch's limits: slopes, steps and gains so small end the iterations, and so little curvature is not remembered.
_FLAT, _STILL, _CURVATURE = 1e-7, 1e-9, 1e-10


class BatchedLBFGS:
    """What torch.optim.LBFGS without line search does, for P problems in n unknowns at a time.

    A problem whose loss stops being finite goes back to its last finite point and stays there.

    Args:
        x: (P, n) where to begin.
        evaluate: the losses and gradients of all problems.
        rate: of every step; the first one is divided by |gradient|_1 where that is above 1.
        history: how many steps are remembered.

    Attributes:
        x: (P, n) where the problems are.
        lost: (P,) which of them met a loss that is not finite.
    """

    def __init__(self, x: torch.Tensor, evaluate: Evaluation, rate: float, history: int = 100) -> None:
        self.x = x.clone()
        self.lost = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        self._evaluate, self._rate, self._history = evaluate, rate, history
        #: Newest last: each problem's step s, the change y of its slope, and 1/(y's), 0 where it did not remember one.
        self._pairs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        #: y's / y'y of the last pair.
        self._scale = x.new_ones(len(x))
        self._begun = torch.zeros_like(self.lost)
        self._step, self._slope = torch.zeros_like(x), torch.zeros_like(x)
        self._safe, self._safe_loss = self.x, x.new_full((len(x),), torch.inf)

    def iterate(self, iterations: int) -> torch.Tensor:
        """Iterate every problem, fewer times if it gains nothing more. Returns the losses (P,) before that."""
        first, slope = self._look(self.x)
        losses = first
        going = ~self.lost & (slope.abs().amax(dim=1) > _FLAT)
        for left in range(iterations - 1, -1, -1):
            if not bool(going.any()):
                break
            direction = self._direction(slope, going)
            # The very first step follows the slope itself, whose length means nothing.
            size = torch.where(self._begun, 1.0, (1 / slope.abs().sum(dim=1)).clamp(max=1.0)) * self._rate
            step = size[:, None] * direction
            self._step = torch.where(going[:, None], step, self._step)
            self._slope = torch.where(going[:, None], slope, self._slope)
            self._begun = self._begun | going
            going = going & (vecdot(slope, direction) <= -_STILL)
            self.x = torch.where(going[:, None], self.x + step, self.x)
            if left and bool(going.any()):
                before = losses
                losses, slope = self._look(self.x)
                gained = (losses - before).abs() >= _STILL
                moved = step.abs().amax(dim=1) > _STILL
                going = going & ~self.lost & gained & moved & (slope.abs().amax(dim=1) > _FLAT)
        return first

    def _look(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses and slopes; lost problems stay at their last safe point."""
        losses, slopes = self._evaluate(x)
        self.lost = self.lost | ~(losses.isfinite() & slopes.isfinite().all(dim=1) & x.isfinite().all(dim=1))
        self.x = self._safe = torch.where(self.lost[:, None], self._safe, x)
        self._safe_loss = torch.where(self.lost, self._safe_loss, losses)
        return self._safe_loss, slopes.masked_fill(self.lost[:, None], 0.0)

    def _direction(self, slope: torch.Tensor, going: torch.Tensor) -> torch.Tensor:
        """(P, n) minus the slope times the inverse Hessian that the history tells of."""
        change = slope - self._slope
        curvature = vecdot(change, self._step)
        new = going & self._begun & (curvature > _CURVATURE)
        if bool(new.any()):
            # Pairs that are not remembered are all zeros, since a rho of 0 would not remove an infinity.
            weight = torch.where(new, 1 / curvature, 0.0)
            pair = (self._step * new[:, None], change * new[:, None], weight)
            self._pairs = [*self._pairs[len(self._pairs) == self._history :], pair]
            self._scale = torch.where(new, curvature / vecdot(change, change), self._scale)
        found, shares = -slope, []
        for step, change, weight in reversed(self._pairs):
            share = weight * vecdot(step, found)
            found = found - share[:, None] * change
            shares.append(share)
        found = found * self._scale[:, None]
        for (step, change, weight), share in zip(self._pairs, reversed(shares), strict=True):
            found = found + (share - weight * vecdot(change, found))[:, None] * step
        return found
