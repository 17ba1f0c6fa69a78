"""Clients that keep exemplars of their classes, within a budget, and train on them (FediCaRL, GLFC, LGA)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from fcl_bench.config import knob
from fcl_bench.errors import UserError
from fcl_bench.methods.exemplars.memory import SCOPES, Ranking, budget_of_each, lists_in, remembered, require_budget
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import GradientClient
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.protocol.context import Context, State
from fcl_bench.protocol.task import Task
from fcl_bench.tracking.console import Notices

log = logging.getLogger(__name__)

#: The stage after a task's rounds in which clients choose what they keep.
EXEMPLARS = "exemplars"


class ExemplarClient(GradientClient):
    """Keeps exemplars (see `methods.exemplars.memory`)."""

    def __init__(self, method: GradientMethod, context: Context) -> None:
        super().__init__(method, context)
        self._notices = Notices(log)

    def directions(self, samples: torch.Tensor) -> torch.Tensor:
        """(n, d) phi / ||phi|| of samples, in float64, under the network at hand."""
        return normalize(self.trainer.features(self.network, samples).double(), dim=1)

    def with_exemplars(
        self, state: State, inputs: torch.Tensor, labels: torch.Tensor, budget: int, ranking: Ranking
    ) -> State:
        """The state with exemplars of these samples, by `remembered`. Warn once if the budget leaves nothing."""
        state = remembered(state, inputs, labels, budget, ranking)
        if (classes := len(lists_in(state))) > budget:
            self._notices.tell(
                "too little",
                f"{self.method.name}: a client that may keep {budget} samples has had {classes} classes, and keeps"
                " nothing from now on (a larger method.memory)",
            )
        return state


class ExemplarServer(GradientServer):
    """Sends only the model in the stage in which exemplars are chosen."""

    def extra_broadcast(self) -> dict[str, torch.Tensor]:
        return {} if self.stage == EXEMPLARS else super().extra_broadcast()

    def may_return(self, task: Task, refused: int, round_: int) -> bool:
        """Nothing builds on the choice of exemplars."""
        return self.stages(task)[refused] == EXEMPLARS or super().may_return(task, refused, round_)


@dataclass
class ExemplarMethod(GradientMethod):
    """A method whose clients keep exemplars.

    Args:
        memory: samples that a client may keep.
        scope: whether `memory` is each client's, or that of all clients together.
    """

    memory: int = knob(2000, least=0)
    scope: str = knob("client", choices=SCOPES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_over != "seen":
            raise UserError("method.loss_over=task: exemplars are of earlier tasks' classes", "method.loss_over=seen")

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        require_budget(self.memory, self.scope, context.clients)

    def budget(self, context: Context) -> int:
        """How many samples a client may keep."""
        return budget_of_each(self.memory, self.scope, context.clients or 1)
