"""Centralised softmax: multinomial logistic regression on everyone's features in one place, the ceiling of the heads.

This is no federated method: clients send their samples' features and labels. It is the reference for methods that train
linear heads on frozen features, as `centralised_ridge` is for closed-form ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.methods.closed_form.base import ClosedFormMethod, ClosedFormServer
from fcl_bench.methods.closed_form.centralised_ridge import CentralisedRidgeClient
from fcl_bench.methods.closed_form.ridge import Solution
from fcl_bench.protocol import compute
from fcl_bench.protocol.context import Context, Task
from fcl_bench.protocol.fields import SUMS, Schema, class_numbers, real
from fcl_bench.protocol.message import Message


class CentralisedSoftmaxServer(ClosedFormServer):
    """W, b = argmin of the mean over all samples so far of -log softmax(H W + b)[y], plus l2 / 2 ||W||^2.

    The bias is free of the penalty. L-BFGS starts from the last task's solution; new classes start at zero.
    """

    method: CentralisedSoftmax
    state: ClassVar[Sequence[str]] = ("Z", "labels", "W", "offsets", "largest_gradient")
    absorbs_late = True

    def __init__(self, method: CentralisedSoftmax, context: Context) -> None:
        super().__init__(method, context)
        self.Z = self.zeros(0, context.inputs)
        self.labels = torch.zeros(0, dtype=torch.int64, device=context.device)
        self.offsets = self.zeros(0)
        #: (1,) the largest absolute value in the objective's gradient where the last search ended.
        self.largest_gradient = self.zeros(1)

    def schema(self, task: Task, stage: str) -> Schema:
        fields = super().schema(task, stage)
        return {**fields, "labels": replace(fields["labels"], among=frozenset(task.columns))}

    def absorb(self, client: int, upload: Message) -> None:
        self.Z = torch.cat([self.Z, upload["Z"]])
        self.labels = torch.cat([self.labels, upload["labels"].to(self.labels)])

    def solution(self) -> Solution:
        H, classes = self.random_features.map(self.Z), self.B.shape[1]
        W = torch.nn.functional.pad(self.W, (0, classes - self.W.shape[1])).requires_grad_()
        b = torch.nn.functional.pad(self.offsets, (0, classes - len(self.offsets))).requires_grad_()
        most = self.method.iterations
        optimiser = torch.optim.LBFGS(
            [W, b],
            max_iter=most,
            max_eval=2 * most,
            tolerance_grad=1e-6,
            tolerance_change=1e-14,
            line_search_fn="strong_wolfe",
        )

        def objective() -> torch.Tensor:
            compute.count(steps=1, trained=len(H))
            optimiser.zero_grad()
            loss = torch.nn.functional.cross_entropy(H @ W + b, self.labels) + self.method.l2 / 2 * W.square().sum()
            loss.backward()
            return loss

        with torch.enable_grad():
            optimiser.step(objective)
            objective()
        assert W.grad is not None
        assert b.grad is not None
        self.largest_gradient = torch.maximum(W.grad.abs().max(), b.grad.abs().max()).reshape(1)
        self.offsets = b.detach()
        return Solution(W.detach(), math.nan)  # no system is solved

    def intercept(self) -> torch.Tensor:
        return self.offsets

    def restored(self) -> None:
        self.bias = self.offsets

    def report(self) -> dict[str, Any]:
        """`largest_gradient` of the objective where the last search ended: 0 at its minimum."""
        return {"largest_gradient": float(self.largest_gradient)}


@dataclass
class CentralisedSoftmax(ClosedFormMethod):
    name: ClassVar[str] = "centralised_softmax"
    client_half = CentralisedRidgeClient
    server_half = CentralisedSoftmaxServer
    search: ClassVar[Mapping[str, str]] = {"l2": "log(1e-6,0.1)"}

    M: int | None = knob(None, least=1)
    l2: float = knob(1e-3, least=0)
    iterations: int = knob(200, least=1)

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        return {"statistics": {"Z": real("n", "d", leaks=SUMS), "labels": class_numbers("n")}}

    def matrices(self) -> int:
        return 0
