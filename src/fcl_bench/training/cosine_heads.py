"""Heads that score by angles: a long class weight, or a long feature vector, gains nothing."""

from __future__ import annotations

import torch
from torch.nn import functional

from fcl_bench.training.network import Network


class CosineHead(torch.nn.Module):
    """Features (n, d) to scores (n, c): eta z'w_c / (|z| |w_c|), eta a factor that is learnt and begins at 1.

    Args:
        weight: (c, d) the class weights w_c.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.scale * functional.linear(functional.normalize(features), functional.normalize(self.weight))


class CosineNetwork(Network):
    """A network whose heads score by angles."""

    def new_head(self, classes: int, seed: int) -> torch.nn.Module:
        """Weights are uniform in +-1/sqrt(d), as a linear head's."""
        return CosineHead(super().new_head(classes, seed).state_dict()["weight"])
