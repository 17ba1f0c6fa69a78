"""A stage before a task's rounds in which clients say how many samples of each class they have (FedDisco, FedGen)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import GradientClient
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import counts
from fcl_bench.protocol.message import Message
from fcl_bench.training.network import Heads

#: The stage, which a method names in `stages` and `uploads`, and its fields.
COUNTS = "counts"
COUNTS_SCHEMA = {"counts": counts("c")}


class CountingClient(GradientClient):
    """Counts its samples in the stage `counts`."""

    def answer(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """`counts` (c,) int32, of the task's classes."""
        columns = torch.tensor(Heads.from_message(broadcast).task, device=client_data.labels.device)
        found = torch.bincount(torch.searchsorted(columns, client_data.labels), minlength=len(columns))
        return Message({"counts": found.to(torch.int32)}), state


class CountingServer(GradientServer):
    """Keeps each client's counts until the next task.

    Attributes:
        counts: client -> (c,) samples of each of the task's classes.
    """

    state: ClassVar[Sequence[str]] = ("counts",)

    def __init__(self, method: GradientMethod, context: Context) -> None:
        super().__init__(method, context)
        self.counts: dict[int, torch.Tensor] = {}

    def start_task(self, task: Task) -> None:
        if len(self.tasks) == task.index:
            self.counts = {}
        super().start_task(task)

    def objection(self, upload: Message) -> str:
        empty = self.stage == COUNTS and not bool(upload["counts"].any())
        return "it counts no sample" if empty else super().objection(upload)

    def absorb_answer(self, client: int, upload: Message) -> None:
        self.counts[client] = upload["counts"].long()
