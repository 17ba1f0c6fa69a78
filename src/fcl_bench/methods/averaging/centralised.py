"""Joint training: everyone's images of all tasks so far in one place, the ceiling of the gradient methods.

This is no federated method: clients send their images and labels, which other methods avoid. The server trains the
same network with the same optimiser, for as many epochs as a client of the other methods makes in a task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Samples
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import EACH, SUMS, Schema, class_numbers, images
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Client
from fcl_bench.randomness import derived_seed
from fcl_bench.tracking.console import progress
from fcl_bench.training.objective import Objective

#: The stage in which clients give their samples away.
SAMPLES = "samples"


class CentralisedClient(Client):
    """Gives away its samples."""

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """The images (n, 3, h, w), a byte per value, and the labels (n,)."""
        each = torch.arange(len(client_data.labels))
        return Message(
            {"images": client_data.inputs, "labels": client_data.labels.to(torch.int32)}, groups={"images": each}
        ), state


class CentralisedServer(GradientServer):
    """Plain SGD over all samples so far.

    Attributes:
        samples: `images` and `labels` of all tasks so far; empty before the first.
    """

    method: Centralised
    state = ("samples",)

    def __init__(self, method: Centralised, context: Context) -> None:
        super().__init__(method, context)
        self.samples: dict[str, torch.Tensor] = {}
        #: Those of the task at hand come after those of earlier tasks.
        self._received: list[Mapping[str, torch.Tensor]] = []

    def broadcast(self, task: Task, round_: int) -> Message:
        """Nothing: the model stays where the samples are."""
        self.stage = SAMPLES
        return Message({}, SAMPLES)

    def schema(self, task: Task, stage: str) -> Schema:
        found = super().schema(task, stage)
        return {**found, "labels": replace(found["labels"], among=frozenset(task.columns))}

    def objection(self, upload: Message) -> str:
        size = tuple(upload["images"].shape[2:])
        known = next((tuple(part["images"].shape[2:]) for part in (self.samples, *self._received) if part), size)
        return "" if size == known else f"its images are of {size} pixels, and those so far of {known}"

    def absorb_answer(self, client: int, upload: Message) -> None:
        self._received.append({"images": upload["images"], "labels": upload["labels"].long()})

    def finish_task(self) -> None:
        found = [part for part in (self.samples, *self._received) if part]
        if not found:
            return
        self.samples, self._received = {name: torch.cat([part[name] for part in found]) for name in found[0]}, []
        if self.method.restart:
            self.network.load({f"body.{name}": value for name, value in self.start.build().state_dict().items()})
            self.network.keep_heads(0)
            self.prepare(self.heads)
        training, seed = self.method.training, self.context.seed
        with progress(training.rounds, f"training on tasks 1 to {self.task + 1}", "round") as bar:
            for round_ in range(training.rounds):
                self.trainer.train(
                    self.network,
                    Samples(self.samples["images"], self.samples["labels"]),
                    training.rate(round_),
                    derived_seed(seed, "training", self.task, round_),
                    # All classes compete: with all samples at hand there is no old task to spare.
                    Objective(),
                )
                bar.update()


@dataclass
class Centralised(GradientMethod):
    name: ClassVar[str] = "centralised"
    compiles: ClassVar[bool] = True
    aggregation: ClassVar[str] = EACH
    server_half = CentralisedServer
    resumes_within_tasks: ClassVar[bool] = False

    loss_classes: str = knob("seen", choices=("seen", "task"))
    restart: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            " has no meaning with all data in one place",
            frozen_stages=0,
            frozen_heads=False,
            loss_classes="seen",
            trains="images",
            ccvr="none",
            fraction=1,
            server_optimizer="average",
            aggregate="mean",
            weighting="samples",
        )

    def uploads(self, context: Context) -> dict[str, Schema]:
        return {SAMPLES: {"images": images("n", 3, "h", "w", leaks=SUMS), "labels": class_numbers("n")}}

    def stages(self, task: Task) -> list[str]:
        return [SAMPLES]

    def client(self, context: Context) -> Client:
        return CentralisedClient()
