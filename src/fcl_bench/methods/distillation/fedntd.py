"""FedNTD: not-true distillation (Lee et al., NeurIPS 2022).

A client keeps what the broadcast model says of the classes that a sample is not of. With q its logits, q^g those of the
broadcast model and -y "without the true class", it minimises

    CE(q, y) + beta tau^2 KL(softmax(q^g_-y / tau) || softmax(q_-y / tau)), a mean over the batch.
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


class NotTrueDistillation(Objective):
    """Cross-entropy and the distillation of the logits that compete in it, without the true class's.

    Args:
        known: the broadcast model.
    """

    def __init__(self, heads: Heads, method: FedNTD, known: Network) -> None:
        super().__init__(heads, method.loss_classes, method.frozen_heads)
        self._method, self._known = method, known

    def score_loss(self, scores: torch.Tensor, labels: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            known, _ = self.competing(self._known(inputs), labels)
        own, places = self.competing(scores, labels)
        distilled = not_true_distillation(own, known, places, self._method.tau)
        return super().score_loss(scores, labels, inputs) + self._method.beta * distilled


def not_true_distillation(scores: torch.Tensor, known: torch.Tensor, labels: torch.Tensor, tau: float) -> torch.Tensor:
    """tau^2 KL(softmax(known_-y / tau) || softmax(scores_-y / tau)), the mean over a batch.

    Args:
        scores: (b, c) logits.
        known: (b, c) those to be preserved.
        labels: (b,) the true classes' places among them.
        tau: temperature.
    """
    # Places, not a mask: a GPU would have to say how many entries a mask has before anything else could be queued.
    places = torch.arange(scores.shape[1] - 1, device=scores.device)
    others = places + (places >= labels[:, None])
    # At least float32, whatever the precision of the forward pass.
    wide = torch.promote_types(scores.dtype, torch.float32)
    own, wanted = (torch.log_softmax(logits.gather(1, others) / tau, dim=1, dtype=wide) for logits in (scores, known))
    return tau**2 * (wanted.exp() * (wanted - own)).sum(dim=1).mean()


class FedNTDClient(GradientClient):
    """Distils from the model that it was sent, and keeps nothing."""

    method: FedNTD

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        if not self.method.beta:
            return super().objective(client_data, broadcast, state)
        return NotTrueDistillation(Heads.from_message(broadcast), self.method, self.frozen_copy())


@dataclass
class FedNTD(GradientMethod):
    name: ClassVar[str] = "fedntd"
    search: ClassVar[Mapping[str, str]] = {"beta": "log(0.1,10)"}
    client_half = FedNTDClient

    beta: float = knob(1.0, least=0)
    tau: float = knob(1.0, above=0)
