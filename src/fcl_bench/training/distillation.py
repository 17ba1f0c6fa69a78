"""Distillation (Li and Hoiem, 2016): a model keeps an earlier model's scores of the classes that it knew."""

from __future__ import annotations

import torch

from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective


class Distilled(Objective):
    """Cross-entropy + strength KD, KD = -mean_x sum_c softmax(q'_c / T) log softmax(q_c / T), q' the teacher's logits.

    Args:
        heads, over, rest: see `Objective`.
        teacher: scores the old classes; its logits are the first ones of the model that learns.
        strength: lambda, of the distillation.
        temperature: T.
    """

    def __init__(
        self, heads: Heads, over: str, rest: bool, teacher: Network, strength: float, temperature: float
    ) -> None:
        super().__init__(heads, over, rest)
        self._teacher, self._strength, self._temperature = teacher, strength, temperature

    def score_loss(self, scores: torch.Tensor, labels: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        loss, T = super().score_loss(scores, labels, inputs), self._temperature
        with torch.no_grad():
            wanted = (self._teacher(inputs) / T).softmax(dim=1)
        distillation = torch.nn.functional.cross_entropy(scores[:, : wanted.shape[1]] / T, wanted)
        return loss + self._strength * distillation
