"""What the data-free methods share: images of earlier classes, made by the server from the model alone.

At the start of every task but the first, the server makes a pool of images, or a generator of them, of the last task's
model. Each participant gets it once, with that model as the teacher, and trains on own and synthetic samples.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch

from fcl_bench.errors import UserError
from fcl_bench.linalg.tensors import with_prefix
from fcl_bench.methods.data_free.generators.synthesis import InputStatistics
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import GradientClient
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.protocol import compute
from fcl_bench.protocol.context import ClientData, Context, Task
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Picture
from fcl_bench.randomness import derived_seed

#: Prefix of the names of made images in a server's state.
_MADE = "made."
#: Images of each task that a run's picture shows.
_PICTURED = 16


def made_prefix(task: int) -> str:
    """Prefix of the names under which images or a generator travel that were made of a task's last model."""
    return f"{_MADE}{task}."


class DataFreeClient(GradientClient):
    """Receives what the server made; `objective` is each method's own."""

    method: DataFreeMethod

    def made(self, client_data: ClientData, broadcast: Message) -> dict[str, torch.Tensor]:
        """What the server made of the last task's final model, by name; empty in the first task."""
        return with_prefix(broadcast, made_prefix(client_data.task - 1))

    def synthetic_seed(self, client_data: ClientData, broadcast: Message) -> int:
        """The seed of the random stream of a client's synthetic samples in a round."""
        return derived_seed(
            self.context.seed, "synthetic", client_data.task, int(broadcast["round"]), client_data.client
        )


class DataFreeServer(GradientServer):
    """Makes images, or a generator, at the start of every task but the first.

    Attributes:
        made: what was made last: `images` (n, 3, size, size) uint8 and `labels` (n,), or a generator's tensors.
    """

    method: DataFreeMethod
    state: ClassVar[Sequence[str]] = ("made", "_shown", "_synthetic")

    def __init__(self, method: DataFreeMethod, context: Context) -> None:
        super().__init__(method, context)
        self.made: dict[str, torch.Tensor] = {}
        self._shown: dict[str, torch.Tensor] = {}
        self._synthetic = 0

    @abstractmethod
    def synthesise(self, task: Task) -> None:
        """Make images and set `made`. `network` is the last task's model, in evaluation mode, without gradients.

        Torch's generators are seeded. The images are of the columns 0 to `task.new_columns.start` - 1.
        """

    def samples_to_show(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(count, 3, size, size) uint8 of what was made, and their columns; the same at every call."""
        return self.made["images"][:count], self.made["labels"][:count]

    def start_task(self, task: Task) -> None:
        # The server does not know which task is the last, so it makes images when the next task begins.
        if task.index and len(self.tasks) == task.index and self.method.replays:
            self._make(task)
        super().start_task(task)

    def _make(self, task: Task) -> None:
        self.network.eval().requires_grad_(False)  # until `start_task` prepares it for the new task
        if InputStatistics(self.network).absent:
            self._notices.tell(
                "batch norm",
                f"{self.method.name}: the backbone has no BatchNorm2d, so synthetic images"
                " are not held to statistics of real ones",
            )
        with self.trainer.reproducible(derived_seed(self.context.seed, "generator", task.index)):
            self.synthesise(task)
            with compute.uncounted():
                images, labels = self.samples_to_show(_PICTURED)
        shown = {"images": images, "labels": labels, "tasks": torch.full_like(labels, task.index - 1)}
        before = self._shown or {name: value[:0] for name, value in shown.items()}
        self._shown = {name: torch.cat([before[name], value]) for name, value in shown.items()}
        self._synthetic += len(self.made.get("images", ()))

    def extra_broadcast(self) -> dict[str, torch.Tensor]:
        prefix = made_prefix(self.task - 1)
        return {**super().extra_broadcast(), **{prefix + name: value for name, value in self.made.items()}}

    def pictures(self) -> dict[str, Picture]:
        if not self._shown:
            return super().pictures()
        return {**super().pictures(), "synthetic": Picture(**self._shown)}

    def gates(self) -> dict[str, str]:
        """`idle_term` where the images that were looked at after the last task are of one class of several."""
        labels = self._shown["labels"][self._shown["tasks"] == self.task - 1].tolist() if self._shown else []
        if len({*chain(*self.tasks[:-1])}) < 2 or len(labels) < 8 or len(set(labels)) > 1:
            return {}
        return {"idle_term": f"the {len(labels)} synthetic images that were looked at are of one class"}

    def privacy(self) -> dict[str, int]:
        """`synthetic_images`: the number of images sent; they are inversions of models, not of single samples."""
        return {**super().privacy(), "synthetic_images": self._synthetic}


@dataclass
class DataFreeMethod(GradientMethod):
    """A method whose server makes images of earlier classes."""

    common_tasks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.trains_network:
            raise UserError(f"method.trains=features: method={self.name} makes images", "method.trains=images")

    @property
    def replays(self) -> bool:
        """Whether anything is made. If not, the method is fedavg, bit for bit."""
        return True

    @property
    def keeps_teacher(self) -> bool:  # type: ignore[override]  # what nobody learns from is not sent
        return self.replays
