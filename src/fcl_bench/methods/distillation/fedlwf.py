"""FedLwF: learning without forgetting (Li and Hoiem, ECCV 2016; TPAMI 2018), federated.

In every task but the first, the model with which the last task ended teaches the old classes' logits on the new images:

    cross-entropy over the task's classes - strength mean_x sum_c softmax(q_old(x) / T)_c log softmax(q(x) / T)_c,

c over the old classes, q_old the teacher's logits in evaluation mode, of the same augmented images. As in the public
code, there is no factor T^2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fcl_bench.config import knob
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import GradientClient
from fcl_bench.protocol.context import ClientData, State
from fcl_bench.protocol.message import Message
from fcl_bench.training.network import Heads
from fcl_bench.training.objective import Distilled, Objective


class FedLwFClient(GradientClient):
    """Trains with the teacher beside it."""

    method: FedLwF

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        teacher, method = self.teacher(client_data, broadcast), self.method
        if teacher is None:
            return super().objective(client_data, broadcast, state)
        heads = Heads.from_message(broadcast)
        return Distilled(heads, method.loss_classes, method.frozen_heads, teacher, method.strength, method.temperature)


@dataclass
class FedLwF(GradientMethod):
    name: ClassVar[str] = "fedlwf"
    search: ClassVar[Mapping[str, str]] = {"strength": "log(0.3,30)"}
    client_half = FedLwFClient

    strength: float = knob(3.0, least=0)
    temperature: float = knob(2.0, above=0)

    @property
    def keeps_teacher(self) -> bool:  # type: ignore[override]  # what nobody learns from is not sent
        return self.strength > 0
