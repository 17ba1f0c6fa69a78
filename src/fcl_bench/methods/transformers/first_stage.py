"""First stages by methods that train a part of their own inside a frozen network: its low-rank updates, its prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fcl_bench.methods.gradient.first_stage import MethodStage
from fcl_bench.methods.transformers.cprompt import CPrompt
from fcl_bench.methods.transformers.pilora import PILoRA


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

    far: ClassVar[float] = 10.0  # type: ignore[misc]
    margin: ClassVar[float] = 1.0  # type: ignore[misc]
