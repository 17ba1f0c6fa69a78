"""Fed-DualPrompt: DualPrompt (Wang et al., ECCV 2022) by federated averaging, in a frozen ViT.

A general prompt (G) sits in the first layers and trains in every task. In further layers each task has a prompt of its
own (E) with a key; the rows of a prompt are keys and values that attention takes beside those of the tokens. With q(x)
the features of the image without a prompt and k_tl the key of task t in layer l, a client minimises in task t

    cross-entropy over the task's classes under G and E_t + pull sum_x sum_l (1 - cos(q(x), k_tl)),

where the task is known in training. A test sample takes in each layer the prompt E_sl with
s = argmax_s cos(q(x), k_sl) over all tasks so far; its task is not given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fcl_bench.config import knob
from fcl_bench.errors import UserError
from fcl_bench.methods.transformers.prompt_method import PromptMethod, require_even
from fcl_bench.methods.transformers.vit.dual_prompts import DualPrompts
from fcl_bench.methods.transformers.vit.prompts import Prompts


@dataclass
class DualPrompt(PromptMethod):
    """Knobs of Fed-DualPrompt.

    Args:
        g_layers, e_layers: the blocks, from 0, that take the general prompt, and those that take the tasks' own.
        g_length, e_length: rows of a prompt in one layer, half of them keys and half values; 0: no such prompt.
        pull: weight of the term that draws keys to queries; 0: keys stay as they are drawn.
        pull_reduction: how that term is reduced over a batch: sum (GT-RIPL's code), mean.
    """

    name: ClassVar[str] = "dualprompt"

    g_layers: list[int] = knob(lambda: [0, 1], least=0)
    g_length: int = knob(6, least=0)
    e_layers: list[int] = knob(lambda: [2, 3, 4], least=0)
    e_length: int = knob(20, least=0)
    pull: float = knob(1.0, least=0)
    pull_reduction: str = knob("sum", choices=("sum", "mean"))

    def __post_init__(self) -> None:
        super().__post_init__()
        require_even("method.g_length", self.g_length)
        require_even("method.e_length", self.e_length)
        if both := sorted(set(self.g_layers) & set(self.e_layers)):
            raise UserError(f"method.g_layers and method.e_layers both have {both}", "one kind of prompt in a layer")

    @property
    def prompted_layers(self) -> dict[str, list[int]]:
        return {"method.g_layers": self.g_layers, "method.e_layers": self.e_layers}

    def prompts(self, dimension: int) -> Prompts:
        return DualPrompts(
            dimension, self.g_layers, self.g_length, self.e_layers, self.e_length, self.pull, self.pull_reduction
        )
