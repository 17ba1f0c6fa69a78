"""First stages by a gradient method: its knobs are those of `adapt`, its trained body is the run's frozen network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import ClassVar, cast

import torch

from fcl_bench.config import counting
from fcl_bench.errors import UserError
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import head_seed
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.protocol.context import Context, Task
from fcl_bench.protocol.method import Server
from fcl_bench.training.knobs import Gaussian


@contextmanager
def _keys_of_adapt() -> Iterator[None]:
    """A method's messages name its keys where the user has set them, at `adapt`."""
    try:
        yield
    except UserError as error:
        what, remedy = (re.sub(r"\bmethod(?=[.=])", "adapt", text) for text in (error.what, error.remedy))
        raise UserError(what, remedy) from error


@dataclass
class MethodStage:
    """A method that trains the first task alone; its knobs are those of `adapt`. The run takes the body, without heads.

    It comes before the method among the bases. A setting without meaning in a first task, or for features, is not a
    knob here.
    """

    trains_network: ClassVar[bool] = True
    training_key: ClassVar[str] = "adapt.training"
    frozen_stages: ClassVar[int] = 0
    frozen_heads: ClassVar[bool] = True
    loss_classes: ClassVar[str] = "seen"
    trains: ClassVar[str] = "images"
    ccvr: ClassVar[str] = "none"
    gaussian: ClassVar[Gaussian] = Gaussian()

    def __post_init__(self) -> None:
        with _keys_of_adapt():
            super().__post_init__()  # type: ignore[misc]  # the method's

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        with _keys_of_adapt():
            super().check(context, classes_per_task)  # type: ignore[misc]  # the method's

    def method(self) -> GradientMethod:
        return cast(GradientMethod, self)

    def trained(self, server: Server) -> dict[str, torch.Tensor]:
        """The part of the body that training may have changed: `body.<name>` -> tensor."""
        state = cast(GradientServer, server).network.state()
        return {name: value for name, value in state.items() if name.startswith("body.")}

    def body(self, context: Context, first: Task, trained: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        """The trained network without its head, in evaluation mode, on the CPU.

        Args:
            context: the network that training started from.
            first: the first task.
            trained: the result of `trained`.
        """
        method = self.method()
        network = method.build_network(context)
        method.grow(network, [len(method.head_columns(first))], head_seed(context))
        network.load(dict(trained))
        return network.body.eval().requires_grad_(False)

    def identity(self) -> dict[str, object]:
        """The method and its knobs."""
        method = self.method()
        return {
            "method": method.name,
            "revision": method.revision,
            **asdict(self),
            "training": counting(method.training),
        }

    def sends_columns(self) -> bool:
        """No model has a matrix per class on the wire."""
        return False
