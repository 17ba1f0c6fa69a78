"""FedDS-AL: dual-stream analytic learning (Zhuang et al., AAAI 2024) over clients, in two rounds per task.

The main stream is STSA, ridge regression on ReLU(Z P). The compensation stream is a second ridge regression, on
tanh(Z P), of what the main stream leaves unexplained. Both need sums over samples only, so the result is the
centralised one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.linalg.gram import grams, product
from fcl_bench.linalg.solve import Solution
from fcl_bench.methods.closed_form.algebra.random_features import RandomFeatures
from fcl_bench.methods.closed_form.base import one_hot
from fcl_bench.methods.closed_form.ridge import Estimate, ridge_knob
from fcl_bench.methods.closed_form.stsa import STSA, STSAClient, STSAServer
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import CLASSES, MOMENTS, SUM, SUMS, Schema, gram_matrix, real
from fcl_bench.protocol.message import Message

#: The stage of the second round.
COMPENSATION = "compensation"


def linear(features: RandomFeatures) -> RandomFeatures:
    """The map to Z P itself: the features of both streams are functions of it."""
    made = copy.copy(features)
    made.activation = "none"
    return made


class DSALClient(STSAClient):
    """Round 0: STSA's statistics. Round 1: those of the residual."""

    method: DSAL

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """G = H'H, C = H'Y; then G = K'K (M, M) and T = K'(Y - H W) (M, c_t) for K = tanh(Z P).

        Y has the columns of the task's classes only: residuals in the columns of earlier classes count as 0.
        """
        if broadcast.stage != COMPENSATION:
            return super().update(client_data, broadcast, state)
        features = linear(self.random_features(broadcast))
        columns, W = broadcast["columns"], broadcast["W"].to(client_data.inputs)
        labels = one_hot(client_data, columns).split(features.rows)
        T = client_data.inputs.new_zeros(len(columns), self.dimension)

        def summed() -> Iterator[torch.Tensor]:
            for ZP, Y in zip(features.blocks(client_data.inputs), labels, strict=True):
                residual = Y - product(W.T, self.method.main(ZP).T).T
                K = ZP.tanh()
                T.addmm_(residual.T, K)
                yield K

        G = grams(summed(), T, self.dimension)
        # Every column of T sums over all samples. With one sample, all columns are multiples of its k.
        return Message({"G": G, "T": T.T}, groups={"T": None}), state


class DSALServer(STSAServer):
    """W = (G + gamma I)^-1 C after round 0, W_c = (G_c + gamma_c I)^-1 T after round 1; scores H W + kappa K W_c.

    Attributes:
        compensation: G_c (M, M), the Gram matrix of K over all tasks so far.
        T: (M, C) the sum of K'R over clients and tasks, each task's R under the W of that task.
        W_c: (M, C) the compensation stream's solution.
    """

    method: DSAL
    state: ClassVar[Sequence[str]] = ("compensation", "T")
    by_class = ("B", "T")
    #: The second round of a task uses all sums of its first round.
    absorbs_late = False

    def __init__(self, method: DSAL, context: Context) -> None:
        super().__init__(method, context)
        self.random_features = linear(self.random_features)
        self.compensation = Estimate(self.dimension, context.dtype, context.device)
        self.T = self.W_c = self.zeros(self.dimension, 0)
        self._second = Solution(self.W_c, 1.0)

    def rounds(self, task: Task) -> int:
        """Two: statistics of the features, then of the residuals."""
        return 2

    def broadcast(self, task: Task, round_: int) -> Message:
        """STSA's; in round 1 also W (M, c_t) of the task's classes, since no other residual counts."""
        message = super().broadcast(task, round_)
        if round_ == 0:
            return message
        self.solve()
        return Message({**message, "W": self.W[:, self.columns]}, COMPENSATION)

    def absorb(self, client: int, upload: Message) -> None:
        if upload.stage != COMPENSATION:
            super().absorb(client, upload)
            return
        self.compensation.add(upload["G"])
        self.T[:, self.columns] += upload["T"]

    def finish_task(self) -> None:
        """Solve the compensation stream. The main stream was solved before the second broadcast."""
        self._compensate()

    def _compensate(self) -> None:
        self._second = self.compensation.solve(self.T, self.method.gamma_c, self.rounding())
        self.W_c = self._second.W
        if trouble := self._second.trouble:
            kind, _, _ = trouble.partition(":")
            self.notices.tell(f"{COMPENSATION}: {kind}", f"ds_al, {COMPENSATION} stream: {trouble}")

    def classifier_c(self) -> torch.Tensor:
        """W_c (M, C), scaled as W is."""
        return self.W_c if self.scales is None else self.W_c * self.scales

    def scores(self, H: torch.Tensor) -> torch.Tensor:
        """Scores (n, C) of both streams, from the Z P (n, M) that is stored in place of H."""
        main = super().scores(self.method.main(H))
        return main.add_(product(self.classifier_c().T, H.tanh().T).T, alpha=self.method.kappa)

    def model(self) -> dict[str, torch.Tensor]:
        return {**super().model(), "W_c": self.classifier_c()}

    def load_model(self, model: dict[str, torch.Tensor], tasks: Sequence[Task]) -> None:
        super().load_model(model, tasks)
        self.W_c = model["W_c"]

    def report(self) -> dict[str, Any]:
        """`compensation`: the `condition` and `trouble` of the second system."""
        _, condition, trouble = self._second
        return {**super().report(), COMPENSATION: {"condition": condition, "trouble": trouble or None}}

    def restored(self) -> None:
        super().restored()
        self._compensate()


@dataclass
class DSAL(STSA):
    name: ClassVar[str] = "ds_al"
    client_half = DSALClient
    server_half = DSALServer
    in_tables = False

    M: int | None = knob(8192, least=1)
    gamma: float | str = ridge_knob(0.1, least=0)
    gamma_c: float = knob(0.1, least=0)
    kappa: float = knob(0.6, least=0)

    def main(self, ZP: torch.Tensor) -> torch.Tensor:
        """H (n, M) of the main stream, from Z P."""
        return ZP if self.M is None or self.activation == "none" else ZP.relu()

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        # tanh is at most 1.
        G = gram_matrix("M", per_sample=1.0, added=True, combine=SUM, leaks=MOMENTS)
        T = real("M", "c", combine=SUM, columns=CLASSES, leaks=SUMS)
        return {**super().uploads(context), COMPENSATION: {"G": G, "T": T}}

    def matrices(self) -> int:
        return super().matrices() + 1
