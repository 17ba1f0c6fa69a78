"""SCAFFOLD (Karimireddy et al., ICML 2020, Algorithm 1): control variates against the drift of clients.

Client k keeps c_k, an estimate of its own gradient; the server keeps c = (1/N) sum_k c_k. A client steps along
g - c_k + c, which takes out what only its own data want. After K steps from x to y it takes option II,

    c_k <- c_k - c + (x - y) / (K eta),

the mean gradient of these steps, and sends y and the change of c_k. The server takes x + eta_g mean(y - x), and
c + (1/N) sum of the changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.linalg.tensors import with_prefix
from fcl_bench.methods.averaging.client_sums import ClientSumClient, ClientSumMethod, ClientSumServer
from fcl_bench.methods.averaging.fedprox import Weights, training_weights
from fcl_bench.methods.gradient.base import ONLY_MEAN
from fcl_bench.methods.gradient.client import MODEL
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import SUM, Schema, real
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import own_rate
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective

#: Prefix of the names of c in a broadcast, and of the change of c_k in an upload.
VARIATE = "variate."


class Corrected(Objective):
    """Adds c - c_k to the gradient of every step.

    Args:
        correction: c - c_k, of the parameters for which there is any.

    Attributes:
        length: K, the number of steps so far; with momentum m what it stands for, the sum of all steps' weights in
            x - y = eta sum_i (1 + m + ... + m^(K-i)) (g_i - c_k + c).
    """

    def __init__(self, heads: Heads, method: Scaffold, correction: Weights) -> None:
        super().__init__(heads, method.loss_classes, method.frozen_heads)
        self._correction, self._momentum = correction, method.training.momentum
        self._weight = self.length = 0.0

    def modify_gradients(self, network: Network) -> None:
        self._weight = 1 + self._momentum * self._weight
        self.length += self._weight
        for name, own in network.training_parameters().items():
            if name in self._correction and own.grad is not None:
                own.grad += self._correction[name]
        super().modify_gradients(network)


class ScaffoldClient(ClientSumClient):
    """Keeps c_k."""

    method: Scaffold
    kept = "variate"
    #: Of the turn at hand: every turn makes its own.
    _corrected: Corrected

    def beside(self, client_data: ClientData, broadcast: Message, state: State, new: State) -> Weights:
        """The change of c_k."""
        before, after = self.own(client_data, state), self.own(client_data, new)
        training = self.network.training_parameters()
        return {VARIATE + name: after[name] - before.get(name, 0) for name in after if name in training}

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        correction = self._common(broadcast)
        for name, value in self.own(client_data, state).items():
            correction[name] = correction[name] - value if name in correction else -value
        self._corrected = Corrected(Heads.from_message(broadcast), self.method, correction)
        return self._corrected

    def changes(self, client_data: ClientData, broadcast: Message) -> Weights:
        """(x - y) / (K eta) - c."""
        common, found = self._common(broadcast), {}
        for name, value in training_weights(self.network).items():
            rate = own_rate(name, self.method.training, float(broadcast["rate"]))
            found[name] = (broadcast[name].to(value) - value) / (self._corrected.length * rate)
            if name in common:
                found[name] -= common[name]
            if name in self._corrected.frozen_rows:  # they take no step, and keep their c_k
                found[name][self._corrected.frozen_rows[name]] = 0
        return found

    def _common(self, broadcast: Message) -> Weights:
        """c; a parameter that is not in it has zero."""
        return {name: value.to(self.context.device) for name, value in with_prefix(broadcast, VARIATE).items()}


class ScaffoldServer(ClientSumServer):
    """Keeps c, and sends it down beside the model."""

    method: Scaffold

    def broadcast(self, task: Task, round_: int) -> Message:
        message = super().broadcast(task, round_)
        if self.stage != MODEL:
            return message
        known = {VARIATE + name: self.mean(name).float() for name in self.parameters() if name in self.sums}
        return message.with_tensors({**message, **known})

    def matching(self, name: str) -> Mapping[str, torch.Tensor]:
        if not name.startswith(VARIATE):
            return super().matching(name)
        return {VARIATE + name: self.sent[name] for name in self.parameters()}

    def absorb_model(self, client: int, upload: Message) -> None:
        super().absorb_model(client, upload)
        for name in self.parameters():
            self.add(name, upload[VARIATE + name])

    def gates(self) -> dict[str, str]:
        if not self.sums or any(bool(total.any()) for total in self.sums.values()):
            return {}
        return {"idle_term": "all variates are zero: this is fedavg"}

    def aggregated(self, mean: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rate = self.method.eta_g
        if rate == 1:
            return mean
        stepped = {name: self.sent[name] + rate * (mean[name] - self.sent[name]) for name in self.parameters()}
        return {**mean, **stepped}


@dataclass
class Scaffold(ClientSumMethod):
    name: ClassVar[str] = "scaffold"
    compiles: ClassVar[bool] = True
    aggregation: ClassVar[str] = ONLY_MEAN
    client_half = ScaffoldClient
    server_half = ScaffoldServer

    eta_g: float = knob(1.0, above=0)

    def uploads(self, context: Context) -> dict[str, Schema]:
        stages = super().uploads(context)
        return {**stages, MODEL: {**stages[MODEL], f"{VARIATE}*": real(combine=SUM)}}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(": SCAFFOLD reads gradients off SGD's steps", optimizer="sgd")
