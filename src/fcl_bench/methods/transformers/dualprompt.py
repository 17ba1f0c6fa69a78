"""Fed-DualPrompt: DualPrompt (Wang et al., ECCV 2022) by federated averaging, in a frozen ViT.

A general prompt (G) sits in the first layers and trains in every task. In further layers each task has a prompt of its
own (E) with a key; the rows of a prompt are keys and values that attention takes beside those of the tokens. With q(x)
the features of the image without a prompt and k_tl the key of task t in layer l, a client minimises in task t

    cross-entropy over the task's classes under G and E_t + pull sum_x sum_l (1 - cos(q(x), k_tl)),

where the task is known in training. A test sample takes in each layer the prompt E_sl with
s = argmax_s cos(q(x), k_sl) over all tasks so far; its task is not given.
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


class DualPrompts(Prompts):
    """General prompts, which train in every task, and expert prompts with keys, which train in their own task alone.

    All start uniform in (0, 1).

    Attributes:
        G: (layers, L, d).
        E: per task, (layers, L, d).
        K: per task, (layers, d), the keys.
    """

    def __init__(self, method: DualPrompt, dimension: int) -> None:
        super().__init__()
        self._method, self._dimension = method, dimension
        self._general = tuple(method.g_layers) if method.g_length else ()
        self._expert = tuple(method.e_layers) if method.e_length else ()
        self.layers = (*self._general, *self._expert)
        self.G: nn.Parameter | None = None
        self.E, self.K = nn.ParameterList(), nn.ParameterList()

    def grow(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        if self._general and self.G is None:
            self.G = self._drawn(generator, len(self._general), self._method.g_length)
        if self._expert:
            self.E.append(self._drawn(generator, len(self._expert), self._method.e_length))
            self.K.append(self._drawn(generator, len(self._expert)))
        self.tasks += 1

    def _drawn(self, generator: torch.Generator, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.rand(*shape, self._dimension, generator=generator))

    def forward(self, queries: torch.Tensor) -> Mapping[int, torch.Tensor]:
        self.penalty = queries.new_zeros(())
        found = {} if self.G is None else {layer: self.G[i : i + 1] for i, layer in enumerate(self._general)}
        if not self._expert:
            return found
        if self.training:
            if self._method.pull:
                self.penalty = self._method.pull * (1 - cosines(queries, self.K[-1])).sum(dim=1).sum()
            return found | {layer: self.E[-1][i : i + 1] for i, layer in enumerate(self._expert)}
        chosen, experts = self.chosen(queries), torch.stack(list(self.E))
        return found | {layer: experts[chosen[:, i], i] for i, layer in enumerate(self._expert)}

    def chosen(self, queries: torch.Tensor) -> torch.Tensor:
        """(b, layers) the task whose key is nearest to the query in each layer of the expert prompts."""
        return cosines(queries, torch.stack(list(self.K))).argmax(dim=1)

    def old(self) -> set[str]:
        return {f"{kind}.{task}" for kind in "EK" for task in range(len(self.E) - 1)}


@dataclass
class DualPrompt(PromptMethod):
    name: ClassVar[str] = "dualprompt"
    common_tasks: ClassVar[bool] = True
    prompts_class = DualPrompts
    layer_knobs = ("g_layers", "e_layers")
    length_knobs = ("g_length", "e_length")

    g_layers: list[int] = knob(lambda: [0, 1], least=0)
    g_length: int = knob(6, least=0)
    e_layers: list[int] = knob(lambda: [2, 3, 4], least=0)
    e_length: int = knob(20, least=0)
    pull: float = knob(1.0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if both := sorted(set(self.g_layers) & set(self.e_layers)):
            raise UserError(f"method.g_layers and method.e_layers both have {both}", "one kind of prompt in a layer")
