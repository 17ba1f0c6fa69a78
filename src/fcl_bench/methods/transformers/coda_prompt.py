"""Fed-CODA-Prompt: CODA-Prompt (Smith et al., CVPR 2023) by federated averaging.

Each prompted layer of a frozen ViT takes a prompt that is a sum of components, weighted by attention to the image's
query q(x), its features without a prompt:

    P(x) = sum_m alpha_m P_m,    alpha_m = cos(q(x) * A_m, K_m),

over the components of all tasks so far. Each task brings a group of them, orthonormal and orthogonal to all earlier
ones, and trains that group and its own class weights by cross-entropy over its own classes, plus

    lambda_o sum_layers sum_{X in A, K, P} mean((X X' - I)^2).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from fcl_bench.config import knob
from fcl_bench.methods.transformers.prompt_method import PromptMethod, require_even
from fcl_bench.methods.transformers.vit.coda import CodaPrompts
from fcl_bench.protocol.context import Context

log = logging.getLogger(__name__)


@dataclass
class CodaPrompt(PromptMethod):
    """Knobs of Fed-CODA-Prompt.

    Args:
        layers: blocks, from 0, that take a prompt.
        components: number of components per task and layer. The paper has 100 in all, so 100 / tasks; the server does
            not know how many tasks will come.
        length: rows of a prompt; the first half are keys, the others values.
        orthogonality: lambda_o; 0: no penalty.
    """

    name: ClassVar[str] = "coda_prompt"

    layers: list[int] = knob(lambda: [0, 1, 2, 3, 4], least=0)
    components: int = knob(10, least=1)
    length: int = knob(8, least=2)
    orthogonality: float = knob(0.0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_even("method.length", self.length)

    @property
    def prompted_layers(self) -> dict[str, list[int]]:
        return {"method.layers": self.layers}

    #: Whether softmax(A_m) takes the place of A_m, as in Fed-CPrompt's public code.
    softmax: ClassVar[bool] = False

    def prompts(self, dimension: int) -> CodaPrompts:
        layers = tuple(self.layers)
        return CodaPrompts(layers, self.components, self.length, dimension, self.orthogonality, self.softmax)

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        tasks, dimension = len(classes_per_task), self.start(context).dimension
        if tasks * self.components > dimension:
            key = self.training_key.removesuffix(".training")
            log.warning(
                "%s.components=%d in %d tasks are more than the %d dimensions of a key: from task %d on, new keys"
                " are random where no orthogonal one is left (%s.components=%d always fits)",
                key,
                self.components,
                tasks,
                dimension,
                dimension // self.components,
                key,
                max(1, dimension // tasks),
            )
