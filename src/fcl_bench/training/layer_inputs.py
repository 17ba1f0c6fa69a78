"""The inputs of a network's layers: activation columns for subspaces, and Gram matrices of all inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from fcl_bench.environment import exact_kernels
from fcl_bench.linalg.gram import add_gram, gram
from fcl_bench.training.network import Network
from fcl_bench.training.trainer import Trainer, forward_batch

#: The input of all heads: the features.
HEADS = "heads"


def projectable(network: Network) -> dict[str, torch.nn.Module]:
    """The layers of the body whose weights have an input subspace, by name: linear ones and ungrouped convolutions.

    Convolutions of a derived class are left out: they may change their inputs first, as TensorFlow's padding does.
    So are layers that are never called: some attention blocks use a linear layer's weight themselves.
    """
    found: dict[str, torch.nn.Module] = {}
    for name, module in network.called_layers():
        plain = type(module) is torch.nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros"
        if plain or isinstance(module, torch.nn.Linear):
            found[f"body.{name}"] = module
    return found


@torch.inference_mode()
def layer_columns(
    trainer: Trainer, network: Network, images: torch.Tensor, layers: list[str], count: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """A uniform choice of `count` activation columns (d_l, m_s) of each layer (FedProTIP 4.2), in float32.

    A convolution's columns are unfolded patches, a token-wise linear layer's are tokens. Only the chosen ones are ever
    held. Of a client with n < m_s samples every image is in; a linear layer on pooled features then has n columns.

    Args:
        network: with the weights to look at.
        images: (n, 3, h, w) uint8.
        layers: names of `projectable`, and `HEADS`.
        count: m_s.
    """
    if len(images) > count:
        images = images[torch.randperm(len(images), generator=generator)[:count].sort().values.to(images.device)]
    modules = projectable(network)
    taps = {name: _Tap(count, len(images), generator) for name in layers}
    hooks = [modules[name].register_forward_hook(tap.take) for name, tap in taps.items() if name != HEADS]
    network.eval()
    try:
        start = 0
        for batch in images.split(forward_batch(images.device)):
            for tap in taps.values():
                tap.start, tap.count = start, len(batch)
            with exact_kernels(), trainer.autocast():
                features = network.body(trainer.standardise(batch))
            if HEADS in taps:
                taps[HEADS].take(network.heads, (features,), features)
            start += len(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: tap.columns() for name, tap in taps.items()}


@torch.inference_mode()
def layer_grams(
    trainer: Trainer,
    network: Network,
    batches: Iterable[torch.Tensor],
    layers: Mapping[str, torch.nn.Module],
    diagonal: Collection[str] = (),
    constant: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """X'X (i, i) of the inputs X (rows, i) of layers, one row per image, token or patch, in float64.

    Args:
        batches: images (b, 3, h, w) uint8; a batch's activations are all that is ever held.
        layers: modules of its body, by names of the caller's. `HEADS`, with any module, stands for the features.
        diagonal: names of those of which only the diagonal (i,) is wanted.
        constant: names of those whose inputs get another one at their end, which is always 1: the bias's. The matrix is
            then (i + 1, i + 1), and holds the sum of the inputs, and how many rows there are.

    Returns:
        By those names; a layer that was never called is not among them.
    """
    sums: dict[str, torch.Tensor] = {}

    def take(name: str, inputs: torch.Tensor) -> None:
        X = all_rows(inputs, layers[name]).double()
        if name in constant:
            X = torch.nn.functional.pad(X, (0, 1), value=1.0)
        if name in diagonal:
            sums[name] = sums.get(name, 0) + X.square().sum(dim=0)
        elif name in sums:
            add_gram(sums[name], X)
        else:
            sums[name] = gram(X)

    hooks = [
        module.register_forward_hook(lambda _, given, __, name=name: take(name, given[0]))
        for name, module in layers.items()
        if name != HEADS
    ]
    network.eval()
    try:
        with exact_kernels():
            for batch in batches:
                with trainer.autocast():
                    features = network.body(trainer.standardise(batch))
                if HEADS in layers:
                    take(HEADS, features)
    finally:
        for hook in hooks:
            hook.remove()
    return sums


class _Tap:
    """Collects the chosen columns of one layer, batch by batch.

    Args:
        images: n, how many images will come.
        generator: for the choice, which is made when the first batch shows how many columns an image has.
    """

    def __init__(self, count: int, images: int, generator: torch.Generator) -> None:
        self.start = self.count = 0
        self._wanted = count
        self._images = images
        # Each layer has its own generator, so its choice does not depend on the order of the layers.
        self._generator = torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        self._sample: torch.Tensor | None = None
        self._place = torch.empty(0, dtype=torch.int64)
        self._parts: list[torch.Tensor] = []

    def take(self, module: torch.nn.Module, given: tuple[Any, ...], output: torch.Tensor) -> None:
        """A forward hook: choose among the columns of what the layer was `given` for the batch at hand."""
        inputs = given[0]
        if isinstance(module, torch.nn.Conv2d):
            gather, places = partial(gather_columns, inputs, module), output.shape[2:].numel()
        else:
            # Windowed attention makes several rows of an image, one after the other.
            tokens = inputs.reshape(self.count, -1, inputs.shape[-1])
            gather, places = partial(_gather_tokens, tokens), tokens.shape[1]
        if self._sample is None:
            total = self._images * places
            chosen = torch.randperm(total, generator=self._generator)[: self._wanted].sort().values
            self._sample, self._place = chosen // places, chosen % places
        here = (self._sample >= self.start) & (self._sample < self.start + self.count)
        self._parts.append(gather(self._sample[here] - self.start, self._place[here]).float())

    def columns(self) -> torch.Tensor:
        """(d, m)."""
        return torch.cat(self._parts, dim=1)


def _gather_tokens(tokens: torch.Tensor, sample: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """(d, m) of tokens (b, places, d), as `gather_columns` for a layer that sees them one by one."""
    return tokens[sample.to(tokens.device), place.to(tokens.device)].T


def gather_columns(
    inputs: torch.Tensor, layer: torch.nn.Conv2d, sample: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """Chosen columns of the unfolded inputs of a convolution, without unfolding the others.

    Args:
        inputs: (b, C, H, W), what the layer gets.
        layer: an ungrouped convolution with zero padding.
        sample: (m,) which image.
        place: (m,) which position of the layer's output, row by row.

    Returns:
        (d, m), d = C kh kw in the order of `weight.flatten(1)`.
    """
    (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    ph, pw = _padding(layer)
    padded = torch.nn.functional.pad(inputs, (pw, pw, ph, ph))
    width = (padded.shape[3] - dw * (kw - 1) - 1) // sw + 1
    place = place.to(inputs.device)
    rows = (place // width * sh).view(-1, 1, 1) + dh * torch.arange(kh, device=inputs.device).view(1, -1, 1)
    columns = (place % width * sw).view(-1, 1, 1) + dw * torch.arange(kw, device=inputs.device).view(1, 1, -1)
    patches = padded[sample.to(inputs.device).view(-1, 1, 1), :, rows, columns]  # (m, kh, kw, C)
    return patches.permute(3, 1, 2, 0).reshape(inputs.shape[1] * kh * kw, len(place))


def all_rows(inputs: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    """All input vectors (m, d) of a layer's weight rows: unfolded patches for a convolution, else along the last axis.

    Args:
        inputs: what the layer gets: (b, C, H, W), or (..., d).
        layer: an ungrouped convolution with zero padding, or a linear layer.
    """
    if not isinstance(layer, torch.nn.Conv2d):
        return inputs.reshape(-1, inputs.shape[-1])
    kernel, stride = (layer.kernel_size[0], layer.kernel_size[1]), (layer.stride[0], layer.stride[1])
    dilation = (layer.dilation[0], layer.dilation[1])
    patches = torch.nn.functional.unfold(inputs, kernel, dilation, _padding(layer), stride)
    return patches.transpose(1, 2).flatten(0, 1)


def _padding(layer: torch.nn.Conv2d) -> tuple[int, int]:
    """The number of zeros above and beside the inputs."""
    if not isinstance(layer.padding, str):
        return layer.padding[0], layer.padding[1]
    if layer.padding == "valid":
        return 0, 0
    above, beside = (d * (k - 1) // 2 for d, k in zip(layer.dilation, layer.kernel_size, strict=True))  # odd kernels
    return above, beside
