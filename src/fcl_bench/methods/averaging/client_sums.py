"""Clients that each keep a sum s_k over their rounds, and a server that keeps the mean of these (FedDyn, SCAFFOLD)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from fcl_bench.linalg.tensors import with_prefix
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import GradientClient
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import EVERYONE
from fcl_bench.training.knobs import Training


class ClientSumClient(GradientClient):
    """Keeps s_k in its state.

    Attributes:
        kept: the first part of the names of s_k there.
    """

    method: ClientSumMethod
    kept: ClassVar[str]

    @abstractmethod
    def changes(self, client_data: ClientData, broadcast: Message) -> dict[str, torch.Tensor]:
        """What a round adds to s_k, by parameter; `network` holds the model as it was trained."""

    def own(self, client_data: ClientData, state: State) -> dict[str, torch.Tensor]:
        """s_k so far; a parameter that is not in it has zero."""
        return with_prefix(state, self._prefix(client_data))

    def remember(self, client_data: ClientData, broadcast: Message, state: State) -> State:
        own = self.own(client_data, state)
        for name, change in self.changes(client_data, broadcast).items():
            own[name] = own[name] + change if name in own else change
        return {self._prefix(client_data) + name: value for name, value in own.items()}

    def _prefix(self, client_data: ClientData) -> str:
        """With the first task whose rounds are in the sum."""
        return f"{self.kept}.{client_data.task if self.method.reset else 0}."


class ClientSumServer(GradientServer):
    """Keeps S = sum_k s_k in float64, s_k being what client k keeps, and N, the number of clients that may have an s_k.

    N counts the clients that had labelled samples of some task since the sums began: the server is told of them when it
    chooses participants. Clients that never have samples never train, so they are in no mean. S is stored and not
    S / N, so that the mean stays the mean when a later task brings new clients.

    Attributes:
        sums: S, by the names of parameters; a parameter without an entry has zero.
        met: the N clients.
    """

    method: ClientSumMethod
    state: ClassVar[Sequence[str]] = ("sums", "met")

    def __init__(self, method: ClientSumMethod, context: Context) -> None:
        super().__init__(method, context)
        self.sums: dict[str, torch.Tensor] = {}
        self.met: set[int] = set()

    def start_task(self, task: Task) -> None:
        if self.method.reset and len(self.tasks) == task.index:
            self.sums, self.met = {}, set()
        super().start_task(task)

    def participants(self, task: Task, round_: int, available: list[int]) -> list[int]:
        self.met |= set(available)
        return super().participants(task, round_, available)

    def absorb(self, client: int, upload: Message) -> None:
        if client != EVERYONE:  # who all were, `participants` has told
            self.met.add(client)
        super().absorb(client, upload)

    def watched(self) -> Mapping[str, torch.Tensor]:
        return {**super().watched(), **{f"{name}, mean of the clients' sums": self.mean(name) for name in self.sums}}

    def parameters(self) -> list[str]:
        """The names of the parameters that the task trains, without running statistics."""
        return list(self.network.training_parameters())

    def add(self, name: str, change: torch.Tensor) -> None:
        """s_k of one client has changed by `change`."""
        change = change.double()
        self.sums[name] = self.sums[name] + change if name in self.sums else change

    def mean(self, name: str) -> torch.Tensor:
        """S / N in float64."""
        return self.sums[name] / len(self.met)

    def report(self) -> dict[str, Any]:
        """`clients`: N."""
        return {**super().report(), "clients": len(self.met)}


@dataclass
class ClientSumMethod(GradientMethod):
    """Knobs of a method with such a server; all clients count alike in the average, as in both papers.

    Args:
        reset: whether clients and server start every task with zeros.
    """

    training: Training = field(default_factory=lambda: Training(weighting="uniform"))
    reset: bool = False
