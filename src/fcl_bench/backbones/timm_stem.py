"""The stem that the literature gives a ResNet for images of 32 pixels."""

from __future__ import annotations

import torch
from torch import nn

from fcl_bench.errors import UserError


def cifar_stem(model: nn.Module, name: str) -> nn.Conv2d:
    """A 3x3 convolution of stride 1 to stand for `model`'s first convolution and pooling (see `put_stem`).

    It is drawn from torch's generator, as timm draws a ResNet's convolutions.

    Raises:
        UserError: the network is no ResNet.
    """
    first = getattr(model, "conv1", None)
    convolutions = [m for m in first.modules() if isinstance(m, nn.Conv2d)] if isinstance(first, nn.Module) else []
    if not convolutions or not isinstance(getattr(model, "maxpool", None), nn.Module):
        raise UserError(f"backbone.stem=cifar: {name} has no conv1 and maxpool", "a ResNet, or backbone.stem=own")
    # A deep stem is several convolutions; the last one's channels are what the rest of the network takes.
    stem = nn.Conv2d(3, convolutions[-1].out_channels, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    return stem


def put_stem(model: nn.Module, stem: nn.Conv2d) -> None:
    """Put `stem` in the place of `model`'s first convolution, and nothing in that of its pooling."""
    model.conv1, model.maxpool = stem, nn.Identity()


def has_stem(state: dict[str, torch.Tensor], stem: nn.Conv2d) -> bool:
    """Whether the weights in `state` were made with a stem such as `stem`."""
    weight = state.get("conv1.weight")
    return weight is not None and weight.shape == stem.weight.shape
