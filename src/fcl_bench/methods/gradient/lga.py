"""LGA (Dong et al., TPAMI 2023): GLFC whose weights look at each earlier task apart, in the distillation too.

Clients, exemplars, signals and messages are GLFC's. With the weights w of `training.category_balance`, the old model's
columns O and its logits q', a client minimises

    L_cur = mean_{i,c} w_i BCE(sigma(q_ic), [c = y_i]) where there is no old model, else
    lam (L_cur + mean_{i,c} w_i BCE(sigma(q_ic), t_ic)),   t_ic = sigma(q'_ic) for c in O, else [c = y_i].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.methods.gradient.glfc import GLFC, GLFCClient, GLFCServer
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.problem import Shard, State
from fcl_bench.training.category_balance import GROUPS, balanced_weights, tempered
from fcl_bench.training.compensation import Compensated, magnitudes
from fcl_bench.training.heads import Heads
from fcl_bench.training.network import Network


class Balanced(Compensated):
    """The loss of the equations above.

    Args:
        heads, rest, learnt, old: see `Compensated`.
        groups: how the groups of earlier tasks are made.
        lam: weight of the loss where there is an old model.
    """

    def __init__(
        self, heads: Heads, rest: bool, learnt: torch.Tensor, old: Network | None, groups: str, lam: float
    ) -> None:
        super().__init__(heads, rest, learnt, old)
        self._task = len(heads.columns) - 1
        sizes = torch.tensor(heads.sizes)
        # A task's head has the columns that first appear in it.
        self._first = torch.arange(len(sizes)).repeat_interleave(sizes).to(learnt.device)
        self._groups, self._lam = groups, lam

    def weights(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        if self._learnt is None:
            return None
        magnitude = tempered(magnitudes(scores, labels), self._task)
        return balanced_weights(magnitude, labels, self._first, self._learnt, self._task, self._groups)

    def combined(self, weighted: torch.Tensor, distilled: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        both = distilled if weights is None else weights.unsqueeze(1) * distilled
        return self._lam * (weighted + both.mean())


class LGAClient(GLFCClient):
    """GLFC's, with another loss."""

    method: LGA

    def objective(self, shard: Shard, broadcast: Message, state: State) -> Balanced:
        heads, method = Heads.from_message(broadcast), self.method
        old, learnt = self.old_model(shard, broadcast, state), self.learnt_columns(heads, state)
        return Balanced(heads, method.frozen_heads, learnt, old, method.groups, method.lam)


@dataclass
class LGA(GLFC):
    """Knobs of LGA.

    Args:
        groups: of the weights, see `training.category_balance`; cumulative is the published code's.
        lam: weight of the loss where there is an old model.
    """

    name: ClassVar[str] = "lga"
    client_half = LGAClient

    groups: str = knob("separate", choices=GROUPS)
    lam: float = knob(1.0, above=0)
