"""The first stage by FedAvg (STSA 4.1)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional

from fcl_bench.config import counting, knob
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.gradient.first_stage import MethodStage
from fcl_bench.protocol.context import Context
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Network

#: What scores the first task's classes while the network trains.
HEADS = ("linear", "cosine")


class CosineHead(torch.nn.Module):
    """Features (n, d) to scores (n, c): eta z'w_c / (|z| |w_c|), eta a factor that is learnt and begins at 1.

    Args:
        weight: (c, d) the class weights w_c.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.scale * functional.linear(functional.normalize(features), functional.normalize(self.weight))


class CosineNetwork(Network):
    """A network whose heads score by angles."""

    def new_head(self, classes: int, seed: int) -> torch.nn.Module:
        """Weights are uniform in +-1/sqrt(d), as a linear head's."""
        return CosineHead(super().new_head(classes, seed).state_dict()["weight"])


@dataclass
class FedAvgAdaptation(MethodStage, FedAvg):
    """FedAvg on the first task. The defaults are STSA's for a ResNet-18 from scratch on CIFAR-100 (E.2)."""

    head: str = knob("linear", choices=HEADS)
    training: Training = field(
        default_factory=lambda: Training(
            rounds=100, epochs=2, batch_size=128, lr=0.04, momentum=0.9, weight_decay=5e-4, schedule="cosine"
        )
    )

    def build_network(self, context: Context) -> Network:
        return CosineNetwork(self.start(context)) if self.head == "cosine" else super().build_network(context)

    def identity(self) -> dict[str, object]:
        return {"revision": self.revision, **counting(self)}
