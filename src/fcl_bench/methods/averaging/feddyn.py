"""FedDyn (Acar et al., ICLR 2021): dynamic regularisation, with which clients and server agree on one optimum.

Client k keeps d_k, the sum of its drifts w_k - w0 over the rounds in which it took part, and minimises

    f_k(w) - <g_k, w> + (alpha_k / 2) ||w - w0||^2,   g_k = -alpha_k d_k,

which is a proximal term around w0 - d_k. The server keeps h = -alpha (1/N) sum_k d_k and sends w0 = m - h / alpha, m
the mean of the last participants' w_k. m is the model that predicts, as in the authors' code: the running statistics
are its own, and it does not overshoot. Where training comes to rest, m = w0 minimises the clients' losses together:
sum_k f_k, or sum_k n_k f_k (all samples' loss) if `scaled`, where alpha_k = alpha (n / N) / n_k, as in their code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.methods.averaging.client_sums import ClientSumClient, ClientSumMethod, ClientSumServer
from fcl_bench.methods.averaging.fedprox import Proximal, Weights, training_weights
from fcl_bench.methods.gradient.base import ONLY_MEAN
from fcl_bench.methods.gradient.client import MODEL
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import EACH, Schema
from fcl_bench.protocol.message import Message
from fcl_bench.training.network import Heads
from fcl_bench.training.objective import Objective

#: The stage in which clients say how many samples they have.
SIZES = "sizes"
#: Prefix of the name of the clients' mean number of samples of a task.
_MEAN = "mean_samples."


class FedDynClient(ClientSumClient):
    """Keeps d_k, and trains near w0 - d_k."""

    method: FedDyn
    kept = "drift"

    def answer(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        return Message({}, samples=len(client_data.labels)), state

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        drift = self.own(client_data, state)
        start = training_weights(self.network)
        centre = {name: value - drift[name] if name in drift else value for name, value in start.items()}
        alpha = self.method.alpha
        if self.method.scaled:
            alpha *= float(broadcast[f"{_MEAN}{client_data.task}"]) / len(client_data.labels)
        heads = Heads.from_message(broadcast)
        return Proximal(heads, self.method.loss_classes, self.method.frozen_heads, centre, alpha, self.method.max_norm)

    def changes(self, client_data: ClientData, broadcast: Message) -> Weights:
        return {name: own - broadcast[name].to(own) for name, own in training_weights(self.network).items()}


class FedDynServer(ClientSumServer):
    """Keeps the mean of the clients' models, and sends it moved on by the mean of all clients' d_k.

    Attributes:
        sizes: samples of the task at hand, and the clients that have them; only if `scaled`.
    """

    method: FedDyn
    counted = (MODEL, SIZES)
    state = ("sizes",)

    def __init__(self, method: FedDyn, context: Context) -> None:
        super().__init__(method, context)
        self.sizes = (0, 0)

    def start_task(self, task: Task) -> None:
        if len(self.tasks) == task.index:
            self.sizes = (0, 0)
        super().start_task(task)

    def broadcast(self, task: Task, round_: int) -> Message:
        message = super().broadcast(task, round_)
        if self.stage != MODEL:
            return message
        frozen = self.frozen_rows()
        for name in self.sums.keys() & set(self.parameters()):
            moved = (self.sent[name].double() + self.mean(name)).float()
            rows = frozen.get(name, [])
            moved[rows] = self.sent[name][rows]
            self.sent[name] = moved
        return message.with_tensors({**message, **self.sent})

    def extra_broadcast(self) -> dict[str, torch.Tensor]:
        samples, clients = self.sizes
        mean = {f"{_MEAN}{self.task}": torch.tensor(samples / clients, dtype=torch.float64)} if clients else {}
        return super().extra_broadcast() | mean

    def absorb_answer(self, client: int, upload: Message) -> None:
        self.sizes = (self.sizes[0] + (upload.samples or 0), self.sizes[1] + upload.clients)

    def absorb_model(self, client: int, upload: Message) -> None:
        super().absorb_model(client, upload)
        for name in self.parameters():
            # In the sum of all uploads models are added up; a node of a tree sends their mean.
            models = upload[name].double() * (1 if self.context.sums else upload.clients)
            self.add(name, models - upload.clients * self.sent[name].double())


@dataclass
class FedDyn(ClientSumMethod):
    name: ClassVar[str] = "feddyn"
    revision: ClassVar[int] = 2  # 1 predicted with w0
    search: ClassVar[Mapping[str, str]] = {"alpha": "log(0.01,10)"}
    compiles: ClassVar[bool] = True
    averaged_with: ClassVar[str] = "method.training.weighting=uniform"
    client_half = FedDynClient
    server_half = FedDynServer

    alpha: float = knob(1.0, above=0)
    scaled: bool = True
    reset: bool = True
    max_norm: float | None = knob(10.0, above=0)

    @property
    def aggregation(self) -> str:  # type: ignore[override]
        """The mean of models that count alike is enough; of others, the sum of the d_k does not follow."""
        return ONLY_MEAN if self.training.weighting == "uniform" else EACH

    def uploads(self, context: Context) -> dict[str, Schema]:
        return {**super().uploads(context), **({SIZES: {}} if self.scaled else {})}

    def stages(self, task: Task) -> list[str]:
        return [SIZES, *super().stages(task)] if self.scaled else super().stages(task)
