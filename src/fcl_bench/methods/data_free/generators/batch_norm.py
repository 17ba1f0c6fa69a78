"""How far a batch's statistics are from those that a network's batch norms have kept of real images.

Of every BatchNorm2d l, (m_l, v_l) are the running mean and variance, (mu_l, s_l) those of the batch at the layer's
input. Images made to bring them together look to the network like those it was trained on (DeepInversion).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

#: The share of the earlier batches in TARGET's and LANDER's averages.
_MOMENTUM = 0.9


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of one layer, per channel (c,): those that it has kept, and those of the batch."""

    kept_mean: torch.Tensor
    kept_variance: torch.Tensor
    mean: torch.Tensor
    variance: torch.Tensor


class InputStatistics:
    """Within `with`, looks at the inputs of a network's BatchNorm2d layers during each forward pass.

    Args:
        network: in evaluation mode, so that its running statistics stay.

    Attributes:
        absent: whether the network has no such layer, so that nothing can be compared.
    """

    def __init__(self, network: nn.Module) -> None:
        self._layers = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
        self._inputs: dict[int, torch.Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.absent = not self._layers

    def __enter__(self) -> InputStatistics:
        for number, layer in enumerate(self._layers):
            self._hooks.append(layer.register_forward_pre_hook(self._keeper(number)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._inputs = [], {}

    def layers(self) -> list[LayerStatistics]:
        """Of the last forward pass, differentiable in its images; a variance is that of the batch (divided by n)."""
        found = []
        for number, inputs in sorted(self._inputs.items()):
            mean, variance = moments(inputs.to(torch.promote_types(inputs.dtype, torch.float32)))
            layer = self._layers[number]
            assert layer.running_mean is not None
            assert layer.running_var is not None
            found.append(LayerStatistics(layer.running_mean, layer.running_var, mean, variance))
        self._inputs = {}
        return found

    def _keeper(self, number: int):  # type: ignore[no-untyped-def]  # torch's hooks have no type
        def keep(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            self._inputs[number] = inputs[0]

        return keep


class _Moments(torch.autograd.Function):
    """Mean and variance of each channel, in a fifth of `torch.var_mean`'s time on a CPU, channels last."""

    @staticmethod
    def forward(ctx: FunctionCtx, maps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1])
        mean = rows.mean(dim=0)
        centred = rows - mean
        ctx.save_for_backward(centred)
        ctx.shape = maps.shape  # type: ignore[attr-defined]
        return mean, centred.square().mean(dim=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, of_mean: torch.Tensor, of_variance: torch.Tensor) -> torch.Tensor:
        [centred] = ctx.saved_tensors  # type: ignore[attr-defined]
        b, c, h, w = ctx.shape  # type: ignore[attr-defined]
        n = len(centred)
        rows = torch.addcmul(of_mean / n, centred, of_variance * (2 / n))
        return rows.view(b, h, w, c).permute(0, 3, 1, 2)


def moments(maps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(c,) mean and (c,) variance, divided by n, of `maps` (b, c, h, w) over all but the channels; differentiable."""
    found: tuple[torch.Tensor, torch.Tensor] = _Moments.apply(maps)
    return found


class Distance:
    """TARGET's and LANDER's R = sum_l || v_l - s~_l ||_2 + || m_l - mu~_l ||_2.

    s~ and mu~ average over the batches so far: 0.9 of what they were and 0.1 of the batch's; at first the batch's own.
    """

    def __init__(self) -> None:
        self._averages: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, layers: Sequence[LayerStatistics]) -> torch.Tensor:
        """R of a batch; its statistics join the averages as `keep` is called."""
        total = torch.zeros(())
        for layer, (mean, variance) in zip(layers, self._mixed(layers), strict=True):
            total = total.to(mean) + (layer.kept_variance - variance).norm() + (layer.kept_mean - mean).norm()
        return total

    def keep(self, layers: Sequence[LayerStatistics]) -> None:
        """Take a batch into the averages, without its gradients."""
        self._averages = [(mean.detach(), variance.detach()) for mean, variance in self._mixed(layers)]

    def _mixed(self, layers: Sequence[LayerStatistics]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        own = [(layer.mean, layer.variance) for layer in layers]
        if not self._averages:
            return own
        share = 1 - _MOMENTUM
        return [
            (_MOMENTUM * before[0] + share * mean, _MOMENTUM * before[1] + share * variance)
            for before, (mean, variance) in zip(self._averages, own, strict=True)
        ]


def divergence(layers: Sequence[LayerStatistics]) -> torch.Tensor:
    """MFCL's R: the mean over layers and channels of log(sqrt(s / v)) - (1 - (v + (m - mu)^2) / s) / 2.

    That is the Kullback-Leibler divergence of a normal law with the kept moments from one with the batch's. 0 without
    layers.
    """
    parts = [
        (
            0.5 * (layer.variance / layer.kept_variance).log()
            - 0.5 * (1 - (layer.kept_variance + (layer.kept_mean - layer.mean).square()) / layer.variance)
        ).mean()
        for layer in layers
    ]
    return torch.stack(parts).mean() if parts else torch.zeros(())
