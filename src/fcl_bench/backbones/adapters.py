"""Bottleneck adapters beside the MLPs of a vision transformer, the only part of it that trains (STSA, App. E.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import dropout

from fcl_bench.config import knob
from fcl_bench.errors import UserError


@dataclass
class Adapters:
    """`backbone.adapters`.

    Args:
        width: r, the units of each bottleneck.
        scale: s, the share of its output that is added.
        bias: whether W_down and W_up come with biases, 0 at first; Eq. 63 has none, STSA's public code has them.
        reads: what the adapter is given: normalised (x_i, what the MLP is given) or stream (what comes before the
            block's second layer norm, as in STSA's public code).
        dropout: share of the bottleneck's units that are set to 0 in training; Eq. 63 has none, the public code has
            0.1.
    """

    width: int = knob(64, least=1)
    scale: float = knob(0.1, above=0)
    bias: bool = knob(True)
    reads: str = knob("normalised", choices=("normalised", "stream"))
    dropout: float = knob(0.0, least=0, below=1)


class AdaptedMlp(nn.Module):
    """x_o = MLP(x_i) + s ReLU(x_i W_down) W_up (STSA Eq. 63), x_i (..., d) being the input of a block's MLP.

    W_up is zero at first, so that the network starts as the plain one; W_down is drawn from torch's generator.

    Args:
        mlp: the block's MLP.
        dimension: d.
        adapters: the knobs.
        norm: the layer norm applied to the MLP's input but not to the adapter's; None: no such norm.
    """

    def __init__(self, mlp: nn.Module, dimension: int, adapters: Adapters, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.Identity() if norm is None else norm
        self.mlp = mlp
        self.down = nn.Linear(dimension, adapters.width, bias=adapters.bias)
        self.up = nn.Linear(adapters.width, dimension, bias=adapters.bias)
        self.scale, self.dropout = adapters.scale, adapters.dropout
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            if zero is not None:
                nn.init.zeros_(zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        units = torch.relu(self.down(x))
        if self.dropout:
            units = dropout(units, self.dropout, self.training)
        return self.mlp(self.norm(x)) + self.scale * self.up(units)


def add_adapters(model: nn.Module, adapters: Adapters, name: str) -> None:
    """Put an adapter into every block of `model`; from then on only the adapters require gradients.

    Raises:
        UserError: the network has no blocks with an MLP, or no norm before the MLP where the adapter has to bypass it.
    """
    blocks = getattr(model, "blocks", None)
    blocks = list(blocks) if isinstance(blocks, (nn.Sequential, nn.ModuleList)) else []
    dimensions = [dimension for block in blocks if (dimension := _input_dimension(getattr(block, "mlp", None)))]
    if not blocks or len(dimensions) < len(blocks):
        raise UserError(
            f"backbone.adapters: {name} has no blocks with an MLP to adapt",
            "a ViT, such as backbone=vit_b16_adapters, or backbone.adapters=null",
        )
    before_norm = adapters.reads == "stream"
    if before_norm and not all(isinstance(getattr(block, "norm2", None), nn.Module) for block in blocks):
        raise UserError(
            f"backbone.adapters.reads=stream: {name} has no norm2 before its MLPs",
            "a ViT, or backbone.adapters.reads=normalised",
        )
    model.requires_grad_(False)
    for block, dimension in zip(blocks, dimensions, strict=True):
        block.mlp = AdaptedMlp(block.mlp, dimension, adapters, block.norm2 if before_norm else None)
        if before_norm:
            block.norm2 = nn.Identity()


def _input_dimension(mlp: object) -> int | None:
    """d of an MLP, from its first linear layer."""
    if not isinstance(mlp, nn.Module):
        return None
    return next((layer.in_features for layer in mlp.modules() if isinstance(layer, nn.Linear)), None)
