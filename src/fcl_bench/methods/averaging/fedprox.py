"""FedProx (Li et al., MLSys 2020): FedAvg whose clients are held to the broadcast model by a proximal term.

A client minimises its own loss + (mu / 2) ||w - w0||^2, w0 being the broadcast model. The gradient of the term,
mu (w - w0), is added after weight decay; at the first step of a round it is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import GradientClient
from fcl_bench.protocol.context import ClientData, State
from fcl_bench.protocol.message import Message
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective

#: Parameters, or something of their shapes, by their names in the network.
Weights = dict[str, torch.Tensor]


def training_weights(network: Network) -> Weights:
    """Copies of the parameters that train."""
    return {name: own.detach().clone() for name, own in network.training_parameters().items()}


class Proximal(Objective):
    """Adds (strength / 2) ||w - centre||^2 to the loss, over the parameters that train.

    Args:
        centre: where the weights are pulled to.
        strength: how hard.
        max_norm: to which the norm of the whole gradient is clipped then; None: no clipping.
    """

    def __init__(
        self, heads: Heads, over: str, rest: bool, centre: Weights, strength: float, max_norm: float | None = None
    ) -> None:
        super().__init__(heads, over, rest)
        self._centre, self._strength, self._max_norm = centre, strength, max_norm

    def modify_gradients(self, network: Network) -> None:
        pulled = [
            (own.grad, own.data, self._centre[name])
            for name, own in network.training_parameters().items()
            if own.grad is not None
        ]
        gradients, weights, centres = (list(column) for column in zip(*pulled, strict=True))
        torch._foreach_add_(gradients, torch._foreach_sub(weights, centres), alpha=self._strength)
        super().modify_gradients(network)
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), self._max_norm)

    def proximal_term(self) -> tuple[Weights, float, float | None]:
        return self._centre, self._strength, self._max_norm


class FedProxClient(GradientClient):
    """Trains near the broadcast model."""

    method: FedProx

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        if not self.method.mu:
            return super().objective(client_data, broadcast, state)
        heads = Heads.from_message(broadcast)
        centre = training_weights(self.network)
        return Proximal(heads, self.method.loss_classes, self.method.frozen_heads, centre, self.method.mu)


@dataclass
class FedProx(GradientMethod):
    name: ClassVar[str] = "fedprox"
    search: ClassVar[Mapping[str, str]] = {"mu": "log(1e-4,1)"}
    compiles: ClassVar[bool] = True
    client_half = FedProxClient

    mu: float = knob(0.01, least=0)
