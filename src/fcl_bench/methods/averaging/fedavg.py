"""Finetune: FedAvg on each task in turn (McMahan et al., 2017), with nothing against forgetting; the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fcl_bench.methods.gradient.base import GradientMethod


@dataclass
class FedAvg(GradientMethod):
    """Knobs of fedavg: those of any gradient method."""

    name: ClassVar[str] = "fedavg"
    compiles: ClassVar[bool] = True
