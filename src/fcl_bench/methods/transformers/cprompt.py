"""Fed-CPrompt: contrastive prompts (Bagwe, Yuan, Pan, Zhang, arXiv 2307.04869, 2023).

It is Fed-CODA-Prompt whose clients hold their model near the broadcast one, and away from the model with which the last
task ended. With the features phi of a client's model, phi_g of the broadcast one and phi_o of the last task's, all of
the same image x, the loss has the further term

    strength mean_x max(near ||phi - phi_g||^2 - far ||phi - phi_o||^2 + margin, 0),

and in the first task, which has no phi_o, strength mean_x near ||phi - phi_g||^2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch

from fcl_bench.config import knob
from fcl_bench.methods.transformers.coda_prompt import CodaPrompt, CodaPrompts, Components
from fcl_bench.methods.transformers.prompts import PromptClient, PromptObjective, prompted
from fcl_bench.protocol.context import ClientData, State
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective


class Contrast(PromptObjective):
    """Fed-CODA-Prompt's loss and the contrast; `network` has the broadcast model."""

    def __init__(self, heads: Heads, method: CPrompt, network: Network) -> None:
        super().__init__(heads, method.loss_classes, method.frozen_heads)
        self.method = method
        self.prompts = prompts = cast(CodaPrompts, prompted(network).prompts)
        # The models differ in their last group alone, so nothing else of them has to be stored.
        self._models = [
            {layer: Components(*(own.detach().clone() for own in prompts.of(layer, count))) for layer in prompts.layers}
            for count in (prompts.tasks, prompts.tasks - 1)
            if count
        ]

    def loss(self, network: Network, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = network.body(inputs)
        loss = self.score_loss(network.logits(features), labels, inputs) + prompted(network).prompts.penalty
        return loss + self.method.strength * self.contrast(network, inputs, features)

    def contrast(self, network: Network, inputs: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The contrast of a batch whose features (b, d) the network has just computed."""
        own = features.to(torch.promote_types(features.dtype, torch.float32))
        return self.method.hinge([(own - theirs).square().sum(dim=1) for theirs in self._theirs(network, inputs)])

    @torch.no_grad()
    def _theirs(self, network: Network, inputs: torch.Tensor) -> list[torch.Tensor]:
        """(b, d) phi_g and, after the first task, phi_o, in one forward pass with the queries already known."""
        body, mixed = prompted(network), self.prompts.mixed
        mixtures = {
            layer: torch.cat([mixed(body.last_queries, model[layer]) for model in self._models])
            for layer in self.prompts.layers
        }
        features = body.under(mixtures, torch.cat([inputs] * len(self._models)))
        return list(features.split(len(inputs)))


class CPromptClient(PromptClient):
    """Trains the task's prompts and head against two earlier models, which it makes of the broadcast one."""

    method: CPrompt

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        if not self.method.strength:
            return super().objective(client_data, broadcast, state)
        return Contrast(Heads.from_message(broadcast), self.method, self.network)


@dataclass
class CPrompt(CodaPrompt):
    name: ClassVar[str] = "cprompt"
    search: ClassVar[Mapping[str, str]] = {"training.lr": "log(1e-5,1e-2)", "strength": "log(0.1,10)"}
    client_half = CPromptClient

    training: Training = field(default_factory=lambda: Training(optimizer="adam", lr=1e-4, weight_decay=0.0, rounds=40))
    orthogonality: float = knob(0.1, least=0)
    strength: float = knob(1.0, least=0)
    near: float = knob(1000.0, least=0)
    far: float = knob(10.0, least=0)
    margin: float = knob(1.0, least=0)
    variant: str = knob("working", choices=("working", "published"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant == "published":
            self.require_published(orthogonality=0)

    @property
    def softmax(self) -> bool:  # type: ignore[override]
        return self.variant == "published"

    def hinge(self, distances: list[torch.Tensor]) -> torch.Tensor:
        """The contrast of distances (b,): to the broadcast model and, after the first task, to the last task's."""
        apart = self.near * distances[0]
        if len(distances) == 1:
            return apart.sum() if self.variant == "published" else apart.mean()
        apart = apart - self.far * distances[1]
        if self.variant == "published":
            return torch.relu(apart.sum() + self.margin)
        return torch.relu(apart + self.margin).mean()
