"""FedAvgM and FedAdam: what the server makes of the old model and the average of the clients'."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fcl_bench.training.knobs import Training

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
