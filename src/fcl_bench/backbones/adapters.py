"""Bottleneck adapters beside the MLPs of a vision transformer, the only part of it that trains (STSA, App. E.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from fcl_bench.config import knob
from fcl_bench.errors import UserError


@dataclass
class Adapters:
    """`backbone.adapters`.

    Args:
        width: r, the units of each bottleneck.
        scale: s, the share of its output that is added.
    """

    width: int = knob(64, least=1)
    scale: float = knob(0.1, above=0)


class AdaptedMlp(nn.Module):
    """x_o = MLP(x_i) + s ReLU(x_i W_down) W_up (STSA Eq. 63), x_i (..., d) being the input of a block's MLP.

    W_up is zero at first, so that the network starts as the plain one; W_down is drawn from torch's generator.
    """

    def __init__(self, mlp: nn.Module, dimension: int, adapters: Adapters) -> None:
        super().__init__()
        self.mlp = mlp
        self.down = nn.Linear(dimension, adapters.width)
        self.up = nn.Linear(adapters.width, dimension)
        self.scale = adapters.scale
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) + self.scale * self.up(torch.relu(self.down(x)))


def add_adapters(model: nn.Module, adapters: Adapters, name: str) -> None:
    """Put an adapter into every block of `model`; nothing else of it requires gradients from then on.

    Raises:
        UserError: the network has no blocks with an MLP.
    """
    blocks = getattr(model, "blocks", None)
    blocks = list(blocks) if isinstance(blocks, (nn.Sequential, nn.ModuleList)) else []
    dimensions = [dimension for block in blocks if (dimension := _input_dimension(getattr(block, "mlp", None)))]
    if not blocks or len(dimensions) < len(blocks):
        raise UserError(
            f"backbone.adapters: {name} has no blocks with an MLP to adapt",
            "a ViT, such as backbone=vit_b16_adapters, or backbone.adapters=null",
        )
    model.requires_grad_(False)
    for block, dimension in zip(blocks, dimensions, strict=True):
        block.mlp = AdaptedMlp(block.mlp, dimension, adapters)


def _input_dimension(mlp: object) -> int | None:
    """d of an MLP, by its first linear layer."""
    if not isinstance(mlp, nn.Module):
        return None
    return next((layer.in_features for layer in mlp.modules() if isinstance(layer, nn.Linear)), None)
