"""AFL: analytic federated learning (He et al., "AFL: A Single-Round Analytic Approach for Federated Learning ...").

Each client solves its own regularised least squares and sends the solution with its regularised Gram matrix. The
absolute aggregation (AA) law turns them into the solution on all data, and the regularisation intermediary (RI) process
takes the regularisers out again. In a task stream the clients of later tasks are further clients of the same round.

The paper aggregates pairwise, with one inverse per client. With its weights of Eq. 8 in the right signs,
(C_u + C_v)^-1 C_u and (C_u + C_v)^-1 C_v, the law says C_agg W_agg = sum_k C_k W_k, so the server here keeps two sums
and solves once (see docs/errata.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.linalg.local_ridge import local_ridge
from fcl_bench.methods.closed_form.base import ClosedFormClient, ClosedFormMethod, RidgeServer, one_hot, ridge_knob
from fcl_bench.protocol.expected import Expectation, gram_matrix, real
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.problem import Shard, State
from fcl_bench.protocol.task import Task


class LocalRidge(ClosedFormClient):
    """Solves a client's own ridge regression, as AFL and AFCL do."""

    def solve(self, X: torch.Tensor, Y: torch.Tensor, gamma: float) -> tuple[torch.Tensor, torch.Tensor]:
        """G = X'X + gamma I (d, d) and W = G^-1 X'Y = X' (XX' + gamma I)^-1 Y, through the smaller side (Eq. 13)."""
        G, W, trouble = local_ridge(X, Y, gamma)
        if trouble:
            self.notices.tell("client", f"a client's own solution with method.gamma={gamma:g}: {trouble}")
        return G, W


class AFLClient(LocalRidge):
    """The local stage (Alg. 1)."""

    method: AFL

    def update(self, shard: Shard, broadcast: Message, state: State) -> tuple[Message, State]:
        """C_k = X'X + gamma I (d, d) and W_k (d, c_t), this task's columns of the client's solution."""
        X = self.features(shard, broadcast)
        C, W = self.solve(X, one_hot(shard, broadcast["columns"]), self.method.gamma)
        return Message({"C": C, "W": W}, samples=self.told(shard), symmetric=["C"], per_class=["W"]), state


class AFLServer(RidgeServer):
    """The aggregation stage: G = C_agg = sum C_k, B = sum C_k W_k, W = (C_agg - K gamma I)^-1 B (Eq. 9-11, 16)."""

    method: AFL

    def expects(self, task: Task, round_: int) -> Expectation:
        d = self.dimension
        return {"C": gram_matrix(d, self.floor_of_features), "W": real(d, len(task.columns))}

    def absorb(self, client: int, upload: Message) -> None:
        self.estimate.matrix.add_(upload["C"])
        self.count(upload)
        self.add_class_sums(upload["C"] @ upload["W"])

    def offset(self) -> float:
        return -self.uploads * self.method.gamma if self.method.ri else 0.0


@dataclass
class AFL(ClosedFormMethod):
    """Knobs of AFL.

    Args:
        M: number of random features; None (the paper): the backbone's features themselves.
        gamma: each client's regulariser (Eq. 12); 0: the client's Moore-Penrose solution.
        ri: remove the regularisers at the end (Eq. 16); false keeps all K gamma of them.
        ridge: what the server adds after that; 0: nothing (the paper); "auto", "gcv": chosen by the statistics.
        scale_scores: divide each class's scores by the root of their sum over the class's own samples.
    """

    name: ClassVar[str] = "afl"
    client_half = AFLClient
    server_half = AFLServer

    M: int | None = knob(None, least=1)
    gamma: float = knob(1.0, least=0)
    ri: bool = True
    ridge: float | str = ridge_knob(0.0, least=0, added=True)

    @property
    def penalty(self) -> float | str:
        return self.ridge
