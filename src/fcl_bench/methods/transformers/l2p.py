"""Fed-L2P: learning to prompt (Wang et al., CVPR 2022) by federated averaging, in a frozen ViT.

All tasks share a pool of M prompts, each with a key k_m; the rows of a prompt are keys and values that attention takes
beside those of the tokens. With q(x) the features of the image without a prompt, an image takes the prompts S(x) whose
`top` keys have the largest cos(q(x), k_m), in training and testing alike. A client minimises

    cross-entropy over the task's classes under the prompts S(x) + pull sum_x sum_{m in S(x)} (1 - cos(q(x), k_m)).

The whole pool trains in every task; only heads of old tasks do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fcl_bench.config import knob
from fcl_bench.errors import UserError
from fcl_bench.methods.transformers.prompts import PromptMethod, Prompts, cosines


class PromptPool(Prompts):
    """A pool of prompts for each layer that takes prompts. All of it trains in every task.

    Prompts and keys start uniform in (0, 1).

    Attributes:
        P: (layers, M, L, d).
        K: (layers, M, d), the keys.
    """

    def __init__(self, method: L2P, dimension: int) -> None:
        super().__init__()
        self._method, self._dimension = method, dimension
        self.layers = tuple(method.layers) if method.length else ()
        self.P: nn.Parameter | None = None
        self.K: nn.Parameter | None = None

    def grow(self, seed: int) -> None:
        if self.layers and self.tasks == 0:
            generator = torch.Generator().manual_seed(seed)
            pools, length, d = (len(self.layers), self._method.pool), self._method.length, self._dimension
            self.P = nn.Parameter(torch.rand(*pools, length, d, generator=generator))
            self.K = nn.Parameter(torch.rand(*pools, d, generator=generator))
        self.tasks += 1

    def forward(self, queries: torch.Tensor) -> Mapping[int, torch.Tensor]:
        self.penalty = queries.new_zeros(())
        if self.P is None or self.K is None:
            return {}
        near = cosines(queries, self.K)
        chosen = near.topk(self._method.top, dim=2).indices
        if self.training and self._method.pull:
            self.penalty = self._method.pull * self._away(near, chosen)
        return {layer: self._prompt(_rows(self.P[i], chosen[:, i])) for i, layer in enumerate(self.layers)}

    def _away(self, near: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The penalty's sum, from cosines (b, layers, M) and the chosen keys (b, layers, top)."""
        if self._method.variant == "published":
            # (b, layers, M): how often all images together chose each prompt, repeated for each image.
            times = torch.zeros_like(near).scatter_(2, chosen, 1.0).sum(dim=0, keepdim=True)
            return (times * (1 - near)).sum(dim=(1, 2)).sum()
        return (1 - near.gather(2, chosen)).sum(dim=(1, 2)).sum()

    @staticmethod
    def _prompt(rows: torch.Tensor) -> torch.Tensor:
        """One prompt (b, top L, d) of several (b, top, L, d): the keys of all, then the values of all."""
        first, second = rows.chunk(2, dim=2)
        return torch.cat([first.flatten(1, 2), second.flatten(1, 2)], dim=1)


def _rows(prompts: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The prompts (M, L, d) at `chosen` (b, top), (b, top, L, d).

    The gradient of `prompts[chosen]` adds up what many images give to one prompt in the order in which threads come to
    it, so that no two runs would have the same bits.
    """
    return nn.functional.embedding(chosen, prompts.flatten(1)).unflatten(-1, prompts.shape[1:])


@dataclass
class L2P(PromptMethod):
    name: ClassVar[str] = "l2p"
    prompts_class = PromptPool

    layers: list[int] = knob(lambda: [0], least=0)
    pool: int = knob(30, least=1)
    length: int = knob(20, least=0)
    top: int = knob(5, least=1)
    pull: float = knob(1.0, least=0)
    variant: str = knob("working", choices=("working", "published"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top > self.pool:
            raise UserError(f"method.top={self.top} of a pool of {self.pool}", f"method.top of at most {self.pool}")
