"""Fed-L2P: learning to prompt (Wang et al., CVPR 2022) by federated averaging, in a frozen ViT.

All tasks share a pool of M prompts, each with a key k_m; the rows of a prompt are keys and values that attention takes
beside those of the tokens. With q(x) the features of the image without a prompt, an image takes the prompts S(x) whose
`top` keys have the largest cos(q(x), k_m), in training and testing alike. A client minimises

    cross-entropy over the task's classes under the prompts S(x) + pull sum_x sum_{m in S(x)} (1 - cos(q(x), k_m)).

The whole pool trains in every task; only heads of old tasks do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fcl_bench.config import knob
from fcl_bench.errors import UserError
from fcl_bench.methods.transformers.prompt_method import PromptMethod, require_even
from fcl_bench.methods.transformers.vit.prompt_pool import PromptPool
from fcl_bench.methods.transformers.vit.prompts import Prompts


@dataclass
class L2P(PromptMethod):
    """Knobs of Fed-L2P.

    Args:
        layers: the blocks, from 0, that take prompts, each from a pool of its own; [0, 1, 2, 3, 4]: deep.
        pool: M, prompts in a pool.
        length: rows of a prompt in one layer, half of them keys and half values; 0: no prompt.
        top: prompts that an image takes.
        pull: weight of the term that draws the chosen keys to queries; 0: keys stay as they are drawn.
        pull_reduction: how that term is reduced over a batch: sum (GT-RIPL's code), mean.
        variant: working; published: that term as in GT-RIPL's code, where every image draws the keys that any image
            of the batch has chosen.
    """

    name: ClassVar[str] = "l2p"

    layers: list[int] = knob(lambda: [0], least=0)
    pool: int = knob(30, least=1)
    length: int = knob(20, least=0)
    top: int = knob(5, least=1)
    pull: float = knob(1.0, least=0)
    pull_reduction: str = knob("sum", choices=("sum", "mean"))
    variant: str = knob("working", choices=("working", "published"))

    def __post_init__(self) -> None:
        super().__post_init__()
        require_even("method.length", self.length)
        if self.top > self.pool:
            raise UserError(f"method.top={self.top} of a pool of {self.pool}", f"method.top of at most {self.pool}")
        if self.variant == "published":
            self.require_published(pull_reduction="sum")

    @property
    def prompted_layers(self) -> dict[str, list[int]]:
        return {"method.layers": self.layers}

    def prompts(self, dimension: int) -> Prompts:
        return PromptPool(
            dimension,
            self.layers,
            self.pool,
            self.length,
            self.top,
            self.pull,
            self.pull_reduction,
            crossed=self.variant == "published",
        )
