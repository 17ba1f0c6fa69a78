"""One forward pass of several clients' convolutional networks: each client is a group of channels.

A tensor of m clients has their rows one after the other in its first dimension: (m o, i, h, w) of a convolution's
(o, i, h, w), (m c,) of a batch norm's (c,), (m L, d) of a head's (L, d). Images are (b, 3 m, side, side). A convolution
with m groups keeps the clients apart; everything else works channel by channel anyway.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from fcl_bench.training.network import Network

#: Layers without weights that treat each channel by itself, or leave the channels of a client beside each other.
_CHANNELWISE = (nn.ReLU, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Identity, nn.Flatten)
#: Channels of the first convolution times the side of the images in pixels, up to which a CPU is faster with the
#: clients side by side: docs/results/training_speed.md.
_NARROW = 128

#: Weights and running statistics of all clients by their names in the network.
Stack = dict[str, torch.Tensor]


def unsuited(network: Network) -> str:
    """Why networks like this one have no grouped form; "" if they have."""
    for module in [*network.body.modules(), *network.heads]:
        if type(module) is nn.Conv2d:
            fits = module.groups == 1 and module.padding_mode == "zeros"
        elif type(module) is nn.BatchNorm2d:
            fits = module.affine and module.track_running_stats and module.momentum is not None
        else:
            fits = type(module) in (nn.Sequential, nn.Linear, *_CHANNELWISE)
        in_body = type(module) is nn.Linear and not any(module is head for head in network.heads)
        if not fits or in_body:
            return f"{type(module).__name__} has no form for several clients at once"
    return ""


def pays(network: Network, side: int) -> bool:
    """Whether this network is narrow enough that a CPU gains: a network with a first convolution, images of `side`."""
    first = next((module for module in network.body.modules() if isinstance(module, nn.Conv2d)), None)
    return first is not None and first.out_channels * side <= _NARROW


def stacked(network: Network, count: int) -> Stack:
    """The network's state `count` times: what clients start from."""
    found = {name: value.repeat(count, *[1] * (value.dim() - 1)) for name, value in network.state().items()}
    return {
        name: value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
        for name, value in found.items()
    }


def first(stack: Mapping[str, torch.Tensor], count: int, of: int) -> Stack:
    """The first `count` of the `of` clients in a stack, as views."""
    return {name: value[: len(value) // of * count] for name, value in stack.items()}


class Grouped:
    """The forward pass of clients whose networks are all like `network`, but for their weights.

    Args:
        network: its layers, and which batch norms are in training mode.
    """

    def __init__(self, network: Network) -> None:
        layers = network.body.named_modules(prefix="body")
        self._layers = [(name, module) for name, module in layers if type(module) is not nn.Sequential]
        self._heads = len(network.heads)

    def scores(self, images: torch.Tensor, held: torch.Tensor, stack: Stack) -> torch.Tensor:
        """The outputs of all heads (m, b, L); running statistics in `stack` take their step.

        Args:
            images: (m, b, 3, side, side) standardised.
            held: (m, b) bool, the rows that are samples of a client; the others fill up, and count nowhere.
            stack: of these m clients.
        """
        m, b = held.shape
        share = None if bool(held.all()) else (held.to(images.dtype) / held.sum(dim=1, keepdim=True)).t()
        x = images.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)
        for name, layer in self._layers:
            if isinstance(layer, nn.Conv2d):
                x = functional.conv2d(
                    x,
                    stack[f"{name}.weight"],
                    stack.get(f"{name}.bias"),
                    layer.stride,
                    layer.padding,
                    layer.dilation,
                    m,
                )
            elif isinstance(layer, nn.BatchNorm2d):
                own = {kind: stack[f"{name}.{kind}"] for kind in ("weight", "bias", "running_mean", "running_var")}
                x = _normalised(x, layer, own, share)
            else:
                x = layer(x)
        features = x.view(b, m, -1).transpose(0, 1)
        weights, biases = (
            torch.cat([stack[f"heads.{head}.{kind}"].unflatten(0, (m, -1)) for head in range(self._heads)], dim=1)
            for kind in ("weight", "bias")
        )
        return torch.baddbmm(biases.unsqueeze(1), features, weights.transpose(1, 2))


def _normalised(x: torch.Tensor, layer: nn.BatchNorm2d, own: Stack, share: torch.Tensor | None) -> torch.Tensor:
    """The batch norm of each client's own samples.

    Args:
        x: (b, m c, h, w).
        layer: its mode, momentum and eps.
        own: weight, bias and running statistics, (m c,) each.
        share: (b, m) one over the number of a client's samples; 0 for a row that fills up; None: no row does.
    """
    mean, var, rate = own["running_mean"], own["running_var"], layer.momentum
    assert rate is not None
    if share is None or not layer.training:
        return functional.batch_norm(x, mean, var, own["weight"], own["bias"], layer.training, rate, layer.eps)
    pixels = x.shape[2] * x.shape[3]
    channels = x.shape[1] // share.shape[1]
    part = (share / pixels).repeat_interleave(channels, dim=1)[:, :, None, None]
    centre = (x * part).sum(dim=(0, 2, 3), keepdim=True)
    centred = x - centre
    spread = (centred.square() * part).sum(dim=(0, 2, 3), keepdim=True)
    with torch.no_grad():
        count = (share > 0).sum(dim=0).to(x.dtype).repeat_interleave(channels) * pixels
        mean.lerp_(centre.flatten(), rate)
        var.lerp_(spread.flatten() * (count / (count - 1)), rate)
    scale = (spread + layer.eps).rsqrt() * own["weight"].view(1, -1, 1, 1)
    return centred * scale + own["bias"].view(1, -1, 1, 1)
