"""First stages by methods that train a part of their own inside a frozen network: its low-rank updates, its prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import ClassVar, cast

from fcl_bench.config import counting
from fcl_bench.errors import UserError
from fcl_bench.methods.gradient.base import Gaussian, GradientMethod
from fcl_bench.methods.transformers.cprompt import CPrompt
from fcl_bench.methods.transformers.pilora import PILoRA
from fcl_bench.protocol.context import Context


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
    """A method that trains the first task alone; its knobs are those of `adapt`.

    It comes before the method among the bases. A setting without meaning in a first task, or for features, is not a
    knob here.
    """

    trains_network: ClassVar[bool] = True
    training_key: ClassVar[str] = "adapt.training"
    frozen_stages: ClassVar[int] = 0
    frozen_heads: ClassVar[bool] = True
    loss_over: ClassVar[str] = "seen"
    on: ClassVar[str] = "images"
    replay_head: ClassVar[str] = "none"
    gaussian: ClassVar[Gaussian] = Gaussian()

    def __post_init__(self) -> None:
        with _keys_of_adapt():
            super().__post_init__()  # type: ignore[misc]  # the method's

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        """Check as the method does."""
        with _keys_of_adapt():
            super().check(context, classes_per_task)  # type: ignore[misc]  # the method's

    def method(self) -> GradientMethod:
        return cast(GradientMethod, self)

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


@dataclass
class PILoRAAdaptation(MethodStage, PILoRA):
    """PILoRA's first task: its low-rank updates are part of the frozen network, its prototypes are dropped."""

    orthogonality: ClassVar[float] = 0.0  # type: ignore[misc]  # knobs of the method, constants here
    variant: ClassVar[str] = "working"  # type: ignore[misc]

    def sends_columns(self) -> bool:
        """The class means go to the server, unless it weighs without them."""
        return self.reweighting != "none"


@dataclass
class CPromptAdaptation(MethodStage, CPrompt):
    """Fed-CPrompt's first task, in which no earlier model is to be far from: its prompts are part of the network."""

    far: ClassVar[float | None] = None  # type: ignore[misc]
    margin: ClassVar[float] = 1.0  # type: ignore[misc]
