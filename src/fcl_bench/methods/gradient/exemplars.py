"""Clients that keep exemplars of their classes, within a budget, and train on them (FediCaRL, GLFC, LGA)."""

from __future__ import annotations

import logging

import torch
from torch.nn.functional import normalize

from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import GradientClient
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.protocol.problem import Problem, State
from fcl_bench.tracking.console import Notices
from fcl_bench.training.memory import Ranking, lists_in, remembered

log = logging.getLogger(__name__)

#: The stage after a task's rounds in which clients choose what they keep.
EXEMPLARS = "exemplars"


class ExemplarClient(GradientClient):
    """Keeps exemplars (see `training.memory`)."""

    def __init__(self, method: GradientMethod, problem: Problem) -> None:
        super().__init__(method, problem)
        self._notices = Notices(log)

    def directions(self, samples: torch.Tensor) -> torch.Tensor:
        """(n, d) phi / ||phi|| of samples, in float64, under the network at hand."""
        return normalize(self.trainer.features(self.network, samples).double(), dim=1)

    def with_exemplars(
        self, state: State, inputs: torch.Tensor, labels: torch.Tensor, budget: int, ranking: Ranking
    ) -> State:
        """The state with exemplars of these samples, by `remembered`; a budget that leaves nothing is told once."""
        state = remembered(state, inputs, labels, budget, ranking)
        if (classes := len(lists_in(state))) > budget:
            self._notices.tell(
                "too little",
                f"{self.method.name}: a client that may keep {budget} samples has had {classes} classes, and keeps"
                " nothing from now on (a larger method.memory)",
            )
        return state


class ExemplarServer(GradientServer):
    """Sends the stage in which exemplars are chosen the model alone."""

    def extra_broadcast(self) -> dict[str, torch.Tensor]:
        return {} if self.stage == EXEMPLARS else super().extra_broadcast()
