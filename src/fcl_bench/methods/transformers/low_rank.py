"""Low-rank updates of frozen linear layers (LoRA; Hu et al., 2022) in the blocks of a ViT, a new one for each task."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fcl_bench.config import knob
from fcl_bench.errors import UserError, choices
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.protocol.context import Context
from fcl_bench.randomness import derived_seed
from fcl_bench.training.network import Network


def transformer_blocks(vit: nn.Module, method: str, backbone: str) -> list[nn.Module]:
    """The blocks of a ViT, each with timm's `Attention` as `attn`.

    Args:
        vit: a network of any kind.
        method, backbone: the names of what asks, and of the network, for messages.

    Raises:
        UserError: it has no such blocks.
    """
    from timm.models.vision_transformer import Attention

    blocks = getattr(vit, "blocks", None)
    found = list(blocks) if isinstance(blocks, (nn.Sequential, nn.ModuleList)) else []
    if not found or not all(isinstance(getattr(block, "attn", None), Attention) for block in found):
        raise UserError(
            f"method={method} works inside a vision transformer, and {backbone} is none",
            "backbone=vit_b16, backbone=vit_32, or backbone=tiny backbone.architecture=vit",
        )
    return found


def require_layers(key: str, layers: list[int], blocks: int) -> None:
    """Raise a `UserError` for layers, numbered from 0, that a network of so many blocks does not have, or twice."""
    if not layers or min(layers) < 0 or max(layers) >= blocks or len(set(layers)) < len(layers):
        raise UserError(f"{key}={layers} for a network of {blocks} blocks", f"distinct numbers from 0 to {blocks - 1}")


def dimension_of(block: nn.Module) -> int:
    """d, the numbers of a token."""
    weight = block.attn.qkv.weight  # type: ignore[union-attr]
    assert isinstance(weight, torch.Tensor)
    return weight.shape[1]


#: Where an update can go in a block: the module's path, and which third of its output (None: all of it).
_PLACES: dict[str, tuple[str, int | None]] = {
    "q": ("attn.qkv", 0),
    "k": ("attn.qkv", 1),
    "v": ("attn.qkv", 2),
    "qkv": ("attn.qkv", None),
    "proj": ("attn.proj", None),
    "fc1": ("mlp.fc1", None),
    "fc2": ("mlp.fc2", None),
}


class LowRank(nn.Module):
    """y = x W' + b + sum_t s_t x A_t' B_t', where W and b are frozen; A_t (r, i) and B_t (o, r) are of task t.

    B_t is zero at first, so a new task starts from the layer as it was. A_t is uniform in +-1/sqrt(i) (Kaiming), drawn
    from a seed.

    Args:
        linear: the layer W (O, i), b; it no longer trains.
        parts: the rows of the output that have updates of their own, by name: (begin, end), o of them.

    Attributes:
        A, B: the factors, by `factor_name`.
        scales: s_t of each task; 1 for tasks without an entry.
        merged: (o, i) by part, added to W in place of all tasks' updates; empty: the updates are added.
    """

    def __init__(self, linear: nn.Linear, parts: Mapping[str, tuple[int, int]]) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.parts = dict(parts)
        self.A, self.B = nn.ParameterDict(), nn.ParameterDict()
        self.scales: dict[int, float] = {}
        self.merged: dict[str, torch.Tensor] = {}
        self.tasks = 0

    def grow(self, rank: int, generator: torch.Generator) -> None:
        """Add an update of this rank for the next task, A drawn by the generator on the CPU."""
        device, inputs = self.linear.weight.device, self.linear.in_features
        for part, (begin, end) in self.parts.items():
            drawn = torch.rand(rank, inputs, generator=generator)
            name = factor_name(part, self.tasks)
            self.A[name] = nn.Parameter(((2 * drawn - 1) / math.sqrt(inputs)).to(device))
            self.B[name] = nn.Parameter(torch.zeros(end - begin, rank, device=device))
        self.tasks += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., i) to (..., O)."""
        y = self.linear(x)
        active = [(task, scale) for task in range(self.tasks) if (scale := self.scales.get(task, 1.0))]
        if not active and not self.merged:
            return y
        for part, (begin, end) in self.parts.items():
            if self.merged:
                update = nn.functional.linear(x, self.merged[part])
            else:
                # The sum over the tasks is one update whose rank is that of all together.
                A = torch.cat([self.A[factor_name(part, task)] for task, _ in active])
                B = torch.cat([scale * self.B[factor_name(part, task)] for task, scale in active], dim=1)
                update = nn.functional.linear(nn.functional.linear(x, A), B)
            if (begin, end) == (0, y.shape[-1]):
                y = y + update
            else:
                y = torch.cat([y[..., :begin], y[..., begin:end] + update, y[..., end:]], dim=-1)
        return y

    def act(self, task: int | None = None) -> None:
        """Let the update of one task act alone; None: the mean of all tasks'."""
        alone = {own: float(own == task) for own in range(self.tasks)}
        self.scales = dict.fromkeys(range(self.tasks), 1 / max(self.tasks, 1)) if task is None else alone

    def delta(self, part: str, task: int) -> torch.Tensor:
        """(o, i) B_t A_t, which a task adds to the rows of W."""
        name = factor_name(part, task)
        return self.B[name] @ self.A[name]

    def mean_delta(self, part: str) -> torch.Tensor:
        """(o, i) the mean of the tasks' B_t A_t."""
        return torch.stack([self.delta(part, task) for task in range(self.tasks)]).mean(dim=0)


def factor_name(part: str, task: int) -> str:
    """The name of a task's factors in `LowRank.A` and `LowRank.B`."""
    return f"{part}_{task}"


def low_rank_layers(body: nn.Module) -> dict[str, LowRank]:
    """The `LowRank` layers in a network's body, by the prefix of their parameters' names in the network."""
    return {f"body.{name}": module for name, module in body.named_modules() if isinstance(module, LowRank)}


def factors(body: nn.Module, task: int) -> dict[str, str]:
    """The names in the network of the factors of a task's updates, each with its kind, A or B."""
    layers = low_rank_layers(body).items()
    parts = [(path, factor_name(part, task)) for path, layer in layers for part in layer.parts]
    return {f"{path}.{which}.{name}": which for path, name in parts for which in "AB"}


def add_low_rank(blocks: list[nn.Module], targets: list[str], layers: list[int] | None) -> None:
    """Put a `LowRank` in the place of each linear layer that a target names, without an update as yet.

    Args:
        blocks: the blocks of a ViT (`transformer_blocks`).
        targets, layers: the knobs.

    Raises:
        UserError: for no layer, or one that is not there or named twice; and for no target, an unknown one, or one that
            is named twice, as q and qkv name the same rows.
    """
    layers = list(range(len(blocks))) if layers is None else layers
    require_layers("method.layers", layers, len(blocks))
    if not targets:
        raise UserError("method.targets=[] updates no layer", choices(_PLACES))
    for target in targets:
        if target not in _PLACES:
            raise UserError(
                f"method.targets={targets}: {target} is no linear layer of a block", choices(_PLACES, target)
            )
    if len(set(targets)) < len(targets) or ("qkv" in targets and {"q", "k", "v"} & set(targets)):
        raise UserError(f"method.targets={targets} names a layer twice", "q, k and v, or qkv")
    for layer in layers:
        for path in dict.fromkeys(_PLACES[target][0] for target in targets):
            linear = dict(blocks[layer].named_modules()).get(path)
            if not isinstance(linear, nn.Linear):
                raise UserError(
                    f"method.targets={targets}: block {layer} of the network has no linear layer {path}",
                    "a plain ViT, such as backbone=vit_b16, or targets of q, k, v, qkv, proj",
                )
            parts = {t: _rows(t, linear, blocks[layer]) for t in targets if _PLACES[t][0] == path}
            parent, _, name = path.rpartition(".")
            setattr(blocks[layer].get_submodule(parent), name, LowRank(linear, parts))


def _rows(target: str, linear: nn.Linear, block: nn.Module) -> tuple[int, int]:
    third, d = _PLACES[target][1], dimension_of(block) if target in ("q", "k", "v") else 0
    return (0, linear.out_features) if third is None else (third * d, (third + 1) * d)


@dataclass
class LowRankMethod(GradientMethod):
    """A method that trains low-rank updates of linear layers inside a frozen ViT, new ones for each task."""

    inside_transformers: ClassVar[bool] = True
    search: ClassVar[Mapping[str, str]] = {"training.momentum": ""}

    frozen_heads: bool = True
    rank: int = knob(4, least=1)
    layers: list[int] | None = knob(None, least=0)
    targets: list[str] = knob(lambda: ["q", "v"])

    def build_network(self, context: Context) -> Network:
        network = super().build_network(context)
        body = network.body.requires_grad_(False)
        add_low_rank(transformer_blocks(body, self.name, self.start(context).name), self.targets, self.layers)
        network.put_body(body)
        return network

    def grow(self, network: Network, sizes: list[int], seed: int) -> None:
        for place, layer in enumerate(low_rank_layers(network.body).values()):
            while layer.tasks < len(sizes):
                drawn = derived_seed(seed, "low rank", layer.tasks, place) % 2**62
                layer.grow(self.rank, torch.Generator().manual_seed(drawn))
        super().grow(network, sizes, seed)

    def frozen(self, network: Network, task: int, reused: Container[int] = frozenset()) -> set[str]:
        old = {name for earlier in range(task) for name in factors(network.body, earlier)}
        return super().frozen(network, task, reused) | old
