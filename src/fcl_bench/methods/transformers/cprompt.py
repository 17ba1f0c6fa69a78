"""Fed-CPrompt: contrastive prompts (Bagwe, Yuan, Pan, Zhang, arXiv 2307.04869, 2023).

It is Fed-CODA-Prompt whose clients hold their model near the broadcast one, and away from the model with which the last
task ended. With the features phi of a client's model, phi_g of the broadcast one and phi_o of the last task's, all of
the same image x, the loss has the further term

    strength mean_x max(near ||phi - phi_g||^2 - far ||phi - phi_o||^2 + margin, 0),

and in the first task, which has no phi_o, strength mean_x near ||phi - phi_g||^2. With `contrast=prompts`, prompts take
the features' place: P of the last group, P_g as broadcast, and P_o of the group before:

    strength max(near ||P - P_g|| - far ||P - P_o|| + margin, 0),    first task: strength near ||P - P_g||.
"""

from __future__ import annotations

from abc import abstractmethod
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

#: Weights `near` and `far` where they are null, by `contrast`.
_WEIGHTS = {"features": (1000.0, 10.0), "prompts": (1.0, 1.0)}


class Contrast(PromptObjective):
    """Fed-CODA-Prompt's loss and the contrast.

    Args:
        heads: the heads of the network.
        method: the knobs.
        network: the network with the broadcast model.
    """

    def __init__(self, heads: Heads, method: CPrompt, network: Network) -> None:
        super().__init__(heads, method.loss_classes, method.frozen_heads)
        self.method = method
        self.prompts = cast(CodaPrompts, prompted(network).prompts)

    def loss(self, network: Network, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = network.body(inputs)
        loss = self.score_loss(network.logits(features), labels, inputs) + prompted(network).prompts.penalty
        return loss + self.method.strength * self.contrast(network, inputs, features)

    @abstractmethod
    def contrast(self, network: Network, inputs: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The contrast of a batch whose features (b, d) the network has just computed."""


class FeatureContrast(Contrast):
    """The contrast of features. Args: as of `Contrast`."""

    def __init__(self, heads: Heads, method: CPrompt, network: Network) -> None:
        super().__init__(heads, method, network)
        prompts, tasks = self.prompts, self.prompts.tasks
        # The models differ in their last group alone, so nothing else of them has to be stored.
        self._models = [
            {layer: Components(*(own.detach().clone() for own in prompts.of(layer, count))) for layer in prompts.layers}
            for count in (tasks, tasks - 1)
            if count
        ]

    def contrast(self, network: Network, inputs: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
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


class PromptContrast(Contrast):
    """The contrast of the prompts P of all layers, as one vector. Args: as of `Contrast`."""

    def __init__(self, heads: Heads, method: CPrompt, network: Network) -> None:
        super().__init__(heads, method, network)
        last = self.prompts.tasks - 1
        self._theirs = [self.prompts.group(task).detach().clone() for task in (last, last - 1) if task >= 0]

    def contrast(self, network: Network, inputs: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        own = self.prompts.group(self.prompts.tasks - 1)
        return self.method.hinge([torch.linalg.vector_norm(own - theirs) for theirs in self._theirs])


class CPromptClient(PromptClient):
    """Trains the task's prompts and head against two earlier models, which it makes of the broadcast one."""

    method: CPrompt

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        if not self.method.strength:
            return super().objective(client_data, broadcast, state)
        objective = FeatureContrast if self.method.contrast == "features" else PromptContrast
        return objective(Heads.from_message(broadcast), self.method, self.network)


@dataclass
class CPrompt(CodaPrompt):
    """Knobs of Fed-CPrompt, beside those of Fed-CODA-Prompt.

    Args:
        contrast: what is compared: features, prompts.
        strength: weight of the contrast; 0: Fed-CODA-Prompt.
        near: weight of the distance to the broadcast model; None: 1000 for features, 1 for prompts.
        far: weight of the distance to the last task's model; None: 10 for features, 1 for prompts.
        margin: of the hinge.
        variant: working, as above; published, as in the public code: one hinge of the sums over the batch,
            attention by softmax(A_m), and no penalty on components that are not orthonormal.
    """

    name: ClassVar[str] = "cprompt"
    search: ClassVar[Mapping[str, str]] = {
        "training.lr": "log(1e-5,1e-2)",
        "training.momentum": "",
        "strength": "log(0.1,10)",
    }
    client_half = CPromptClient

    training: Training = field(default_factory=lambda: Training(optimizer="adam", lr=1e-4, weight_decay=0.0, rounds=40))
    orthogonality: float = knob(0.1, least=0)
    contrast: str = knob("features", choices=tuple(_WEIGHTS))
    strength: float = knob(1.0, least=0)
    near: float | None = knob(None, least=0)
    far: float | None = knob(None, least=0)
    margin: float = knob(1.0, least=0)
    variant: str = knob("working", choices=("working", "published"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant == "published":
            self.require_published(contrast="features", orthogonality=0)

    @property
    def softmax(self) -> bool:  # type: ignore[override]
        return self.variant == "published"

    def hinge(self, distances: list[torch.Tensor]) -> torch.Tensor:
        """The contrast from the distances, of each sample (b,) or of the model (), to the broadcast model and to the
        last task's.

        In the first task there is no last task's model, and only the first distance counts.
        """
        near, far = (
            usual if own is None else own
            for own, usual in zip((self.near, self.far), _WEIGHTS[self.contrast], strict=True)
        )
        apart = near * distances[0]
        if len(distances) == 1:
            return apart.sum() if self.variant == "published" else apart.mean()
        apart = apart - far * distances[1]
        if self.variant == "published":
            return torch.relu(apart.sum() + self.margin)
        return torch.relu(apart + self.margin).mean()
