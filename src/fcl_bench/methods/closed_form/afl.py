"""AFL: analytic federated learning (He et al., "AFL: A Single-Round Analytic Approach for Federated Learning ...").

Each client solves its own regularised least squares and sends the solution with its regularised Gram matrix. The
absolute aggregation (AA) law turns them into the solution on all data, and the regularisation intermediary (RI) process
takes the regularisers out again. In a task stream the clients of later tasks are further clients of the same round.

The paper aggregates pairwise, with one inverse per client. With its weights of Eq. 8 in the right signs,
(C_u + C_v)^-1 C_u and (C_u + C_v)^-1 C_v, the law says C_agg W_agg = sum_k C_k W_k, so the server here keeps two sums
and solves once (docs/errata/afl.md). The pairwise form is there as `aggregation=recursive`: it needs clients whose
matrices can be inverted, and shows what happens where they cannot be (Table 3, gamma 0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.errors import UserError
from fcl_bench.linalg.gram import class_sums, gram
from fcl_bench.linalg.solve import Solution, relative_rounding, solve_symmetric
from fcl_bench.methods.closed_form.base import one_hot, positions
from fcl_bench.methods.closed_form.ridge import RidgeClient, RidgeMethod, RidgeServer, ridge_knob
from fcl_bench.protocol.combining import Combination, as_one, total
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import CLASSES, COLUMN, MOMENTS, SQUARE, SUM, SUMS, Schema, gram_matrix, real
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Server

#: What helps where the recursion inverts a singular matrix.
_REMEDY = "method.aggregation=sum needs no inverse, a larger method.gamma would make them regular"


class PairwiseLaw:
    """W_agg of the clients so far by Eq. 9-11 of AFL, with the sign that holds (docs/errata/afl.md, 1).

    With C = C_agg + C_k, the weight of W_agg is I - C_agg^-1 C_k (I - C^-1 C_k), and that of W_k the same with C_agg
    and C_k interchanged. In exact arithmetic and for invertible matrices these are C^-1 C_agg and C^-1 C_k, so that
    C W is the running sum of all C_k W_k. A C_k that is singular but for rounding has an inverse made of rounding
    errors, and the differences above no longer cancel.

    A matrix whose elimination meets an exact zero has no inverse; its Moore-Penrose inverse stands in (as in Eq. 4).

    Args:
        size: d.
        rounding: relative error of the entries of each C_k; at least that of `dtype` is assumed.

    Attributes:
        W: (d, C).
        inverted: how many matrices were inverted.
        singular: how many of them are singular to rounding: their condition number is above 1 / rounding.
        condition: the largest of their condition numbers, in the 1-norm.
    """

    state = ("W", "inverted", "singular", "condition")

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, rounding: float = 0.0) -> None:
        self.W = torch.zeros(size, 0, dtype=dtype, device=device)
        self.inverted = 0
        self.singular = 0
        self.condition = 1.0
        self._limit = 1 / max(rounding, torch.finfo(dtype).eps)
        #: C_agg^-1; None: not computed, as in a resumed run.
        self._R: torch.Tensor | None = None

    def add(self, C_agg: torch.Tensor, C: torch.Tensor, W: torch.Tensor) -> None:
        """One more client. The first one is taken unchanged: Alg. 1 would invert it with C_agg = 0.

        Args:
            C_agg: (d, d) sum over the clients so far.
            C, W: (d, d) and (d, C) of this one.
        """
        R = self._counted_inverse(C)
        if self.inverted == 1:
            self.W, self._R = W, R
            return
        R_agg = inverse(C_agg)[0] if self._R is None else self._R
        self._R = self._counted_inverse(C_agg + C)
        # Multiplied from the right, so that each product has only the few columns of W.
        own, other = C @ self.W, C_agg @ W
        self.W = self.W - R_agg @ (own - C @ (self._R @ own)) + W - R @ (other - C_agg @ (self._R @ other))

    def widen(self, classes: int) -> None:
        """Columns of zeros for classes that no client so far has."""
        self.W = torch.nn.functional.pad(self.W, (0, classes - self.W.shape[1]))

    def _counted_inverse(self, A: torch.Tensor) -> torch.Tensor:
        R, condition = inverse(A)
        self.inverted += 1
        self.singular += condition >= self._limit
        self.condition = max(self.condition, condition)
        return R


def inverse(A: torch.Tensor) -> tuple[torch.Tensor, float]:
    """A^-1 (d, d) by elimination, and the condition number of A in the 1-norm.

    If an exact zero ends the elimination, the results are the Moore-Penrose inverse of a symmetric A and the largest
    condition number that its type resolves.
    """
    R, failed = torch.linalg.inv_ex(A)
    if bool(failed):
        return torch.linalg.pinv(A, hermitian=True), 1 / torch.finfo(A.dtype).eps
    return R, float(torch.linalg.matrix_norm(A, 1) * torch.linalg.matrix_norm(R, 1))


class LocalRidge(RidgeClient):
    """Solves a client's own ridge regression, as AFL and AFCL do."""

    def solve(self, X: torch.Tensor, Y: torch.Tensor, gamma: float) -> tuple[torch.Tensor, torch.Tensor]:
        """G = X'X + gamma I (d, d) and W = G^-1 X'Y = X' (XX' + gamma I)^-1 Y, through the smaller side (Eq. 13).

        With gamma 0, W is the Moore-Penrose solution.
        """
        G, rounding = gram(X), relative_rounding(X.dtype)
        if len(X) < X.shape[1]:
            W, _, trouble = solve_symmetric(gram(X.T), Y, rounding, gamma)
            W = (W.T @ X).T
        else:
            # In this order the product with Y's few columns takes a third of the time of X'Y.
            W, _, trouble = solve_symmetric(G, (Y.T @ X).T, rounding, gamma)
        G.diagonal().add_(gamma)
        if trouble:
            self.notices.tell("client", f"a client's own solution with method.gamma={gamma:g}: {trouble}")
        return G, W


class AFLClient(LocalRidge):
    """The local stage (Alg. 1)."""

    method: AFL

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """C_k = X'X + gamma I (d, d), and W_k or B_k = C_k W_k = X'Y (d, c_t) in the task's columns.

        B_k, for which nothing is solved, gives away no more than W_k, from which it follows.
        """
        X, columns = self.features(client_data, broadcast), broadcast["columns"]
        if self.method.sends_sums(self.context):
            C = gram(X)
            C.diagonal().add_(self.method.gamma)
            upload = {"C": C, "B": class_sums(X, positions(client_data, columns), len(columns))}
        else:
            C, W = self.solve(X, one_hot(client_data, columns), self.method.gamma)
            upload = {"C": C, "W": W}
        return Message(upload, samples=self.reported_samples(client_data)), state


class AFLServer(RidgeServer):
    """The aggregation stage: G = C_agg = sum C_k, B = sum C_k W_k, W = (C_agg - K gamma I)^-1 B (Eq. 9-11, 16)."""

    method: AFL
    absorbs_late = True

    def absorb(self, client: int, upload: Message) -> None:
        self.estimate.matrix.add_(upload["C"])
        self.count(upload)
        self.add_class_sums(upload["B"] if "B" in upload else upload["C"] @ upload["W"])

    def offset(self) -> float:
        return -self.uploads * self.method.gamma if self.method.ri else 0.0


class RecursiveAFLServer(AFLServer):
    """The aggregation stage as Algorithm 1 writes it: client by client in order of arrival (Eq. 9-11), then Eq. 16.

    B stays the sum of all C_k W_k, for `scale_scores`; W does not come from it.
    """

    state: ClassVar[Sequence[str]] = ("law",)

    def __init__(self, method: AFL, context: Context) -> None:
        super().__init__(method, context)
        self.law = PairwiseLaw(self.dimension, context.dtype, context.device, self.rounding())

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self.law.widen(self.B.shape[1])

    def absorb(self, client: int, upload: Message) -> None:
        W = self.zeros(*self.B.shape)
        W[:, self.columns] = upload["W"]
        self.law.add(self.estimate.matrix, upload["C"], W)
        super().absorb(client, upload)

    def solution(self) -> Solution:
        """W_agg, or (C_agg + (ridge - K gamma) I)^-1 C_agg W_agg; zeros once the recursion has overflowed."""
        law, shift = self.law, self.offset() + self.ridge
        if not bool(torch.isfinite(law.W).all()):
            trouble = f"the recursion has overflowed: {self.uploads} clients; its classifier is zero"
            return Solution(torch.zeros_like(law.W), law.condition, f"{trouble}; {_REMEDY}")
        trouble = ""
        if law.singular:
            trouble = (
                f"the recursion inverts singular matrices: {law.singular} of {law.inverted} are singular to rounding,"
                f" condition number up to {law.condition:.1e}; {_REMEDY}"
            )
        if shift == 0:
            return Solution(law.W, law.condition, trouble)
        W, condition, further = self.estimate.solve(self.estimate.matrix @ law.W, shift, self.rounding())
        return Solution(W, max(condition, law.condition), "; ".join(filter(None, (trouble, further))))


@dataclass
class AFL(RidgeMethod):
    name: ClassVar[str] = "afl"
    client_half = AFLClient
    server_half = AFLServer
    in_tables = True

    M: int | None = knob(None, least=1)
    gamma: float = knob(1.0, least=0)
    ri: bool = True
    aggregation: str = knob("sum", choices=("sum", "recursive"))
    upload: str = knob("solution", choices=("solution", "sums"))
    ridge: float | str = ridge_knob(0.0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ignores_partition = self.ri  # the regularisers that stay count the clients
        if self.upload == "sums" and self.aggregation == "recursive":
            raise UserError(
                "method.upload=sums has no solutions for method.aggregation=recursive to aggregate",
                "method.upload=solution, or method.aggregation=sum",
            )

    def sends_sums(self, context: Context) -> bool:
        """Whether clients send C_k W_k in place of W_k."""
        return self.upload == "sums" or (context.sums and self.aggregation == "sum")

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        # Nobody has bounded what one sample changes in W_k.
        square, column = (SQUARE, COLUMN) if self.upload == "sums" else ("", "")
        least = self.least_feature
        C = gram_matrix("M", least, shift=self.gamma, combine=SUM, one_sample=square, leaks=MOMENTS)
        if self.sends_sums(context):
            B = real("M", "c", least=least, of="C", combine=SUM, one_sample=column, columns=CLASSES, leaks=SUMS)
            return {"statistics": {"C": C, "B": B}}
        W = real("M", "c", columns=CLASSES, leaks=SUMS, otherwise="method.aggregation=sum method.upload=sums")
        return {"statistics": {"C": C, "W": W}}

    def combination(self, context: Context) -> Combination | None:
        """With solutions, the aggregation law of several clients (Eq. 9-11): C = sum C_k, W = C^-1 sum C_k W_k."""
        if self.upload == "sums":
            return super().combination(context)
        rounding = relative_rounding(context.dtype, context.wire.dtype)

        def combined(uploads: Sequence[Message]) -> Message:
            C = total(uploads, "C")
            sums = torch.stack([upload["C"] @ upload["W"] for upload in uploads]).sum(dim=0)
            return as_one(uploads, {"C": C, "W": solve_symmetric(C, sums, rounding).W})

        return combined

    def matrices(self) -> int:
        # The recursion needs the inverses of C_agg, of C_k and of their sum, and that sum.
        return super().matrices() + (4 if self.aggregation == "recursive" else 0)

    def server(self, context: Context) -> Server:
        half = RecursiveAFLServer if self.aggregation == "recursive" else AFLServer
        return half(self, context)
