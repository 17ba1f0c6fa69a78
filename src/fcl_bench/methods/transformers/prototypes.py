"""Class prototypes in place of class weights: a score says how near a sample's features are to the prototype."""

from __future__ import annotations

import torch

from fcl_bench.training.network import Network

#: Standard deviation of a new prototype's numbers.
_INITIAL = 0.1


class Prototypes(torch.nn.Module):
    """Features (n, d) to scores (n, c) that are negative distances: -D_c = -sqrt(||z - w_c||^2 / d).

    Args:
        weight: (c, d) the prototypes w_c.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        # In float32 at least, whatever the forward pass has. The square is not expanded, since that cancels.
        kind = torch.promote_types(features.dtype, self.weight.dtype)
        far = torch.cdist(features.to(kind), self.weight.to(kind), compute_mode="donot_use_mm_for_euclid_dist")
        return -far / features.shape[1] ** 0.5


class PrototypeNetwork(Network):
    """A network whose heads are prototypes."""

    def new_head(self, classes: int, seed: int) -> torch.nn.Module:
        drawn = torch.randn(classes, self.dimension, generator=torch.Generator().manual_seed(seed))
        return Prototypes(_INITIAL * drawn)

    def classifier(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The linear form: the nearest prototype has the largest z . w_c - ||w_c||^2 / 2."""
        weight = torch.cat(list(self.heads.parameters())).detach()
        return weight, -weight.square().sum(dim=1) / 2
