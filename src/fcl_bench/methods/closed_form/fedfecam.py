"""FedFeCAM: Mahalanobis distances to class prototypes, with a covariance per class (Goswami et al., "FeCAM", 2023).

One round per task. Each client sends class sums and second moments of its features after Tukey's transform; the server
adds them up over clients and tasks, shrinks each class's covariance, scales it to correlations, and classifies by the
nearest prototype. The sums are exact, so the result is the centralised one, whatever the partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from fcl_bench.config import knob
from fcl_bench.errors import UserError, require_memory
from fcl_bench.linalg.gram import add_gram
from fcl_bench.linalg.solve import Solution, extremes, relative_rounding
from fcl_bench.linalg.structure import packed, symmetric, triangular
from fcl_bench.methods.closed_form.base import ClosedFormClient, ClosedFormMethod, ClosedFormServer, positions
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import EACH, MOMENTS, SUM, SUMS, Schema, counts, real
from fcl_bench.protocol.message import Message

#: The type in which the server keeps a covariance of each class.
KEPT = torch.float32
#: Relative rounding of float64, which `linalg.solve.relative_rounding` does not include.
EPS = 2.0**-52


class Whitening(NamedTuple):
    """The factor that gives distances under a covariance S: r' S^+ r = |r T|^2.

    Attributes:
        factor: T, (d, d) upper triangular.
        condition: largest over smallest eigenvalue of the inverted part; an estimate.
        rank: the rank of S beyond its rounding; below d the inverse is the Moore-Penrose one.
        indefinite: whether S has eigenvalues below zero beyond its rounding, which are left out too.
    """

    factor: torch.Tensor
    condition: float
    rank: int
    indefinite: bool = False


def scatter(second: torch.Tensor, products: torch.Tensor, rounding: float = 0.0) -> torch.Tensor:
    """sum (h - m)(h - m)' = Q - n m m' (d, d), n m m' summed over classes; zero in features that vary by rounding only.

    `rounding` is the relative error of the entries of Q beside float64's.
    """
    made = second - products
    constant = made.diagonal() <= 8 * (rounding + EPS) * second.diagonal()
    made[constant] = 0
    made[:, constant] = 0
    return made


def shrunk(S: torch.Tensor, a1: float, a2: float) -> torch.Tensor:
    """S + a1 V1 I + a2 V2 (1 1' - I): V1 is the mean of the diagonal, V2 that of the nonzero entries off it."""
    variance = S.diagonal().mean()
    beside = S - torch.diag(S.diagonal())
    V2 = beside.sum() / beside.count_nonzero().clamp_min(1)
    made = S + a2 * V2
    made.diagonal().add_(a1 * variance - a2 * V2)
    return made


def deviations(S: torch.Tensor) -> torch.Tensor:
    """(d,) standard deviations; 1 for a feature that does not vary."""
    variances = S.diagonal()
    return torch.where(variances > 0, variances, 1.0).sqrt()


def correlations(S: torch.Tensor) -> torch.Tensor:
    """S_ij / (s_i s_j) (d, d), 1 on the diagonal; a feature that does not vary has no correlation with any other."""
    s = deviations(S)
    made = S / s / s.unsqueeze(1)
    made.diagonal().fill_(1)
    return made


def whitening(S: torch.Tensor, noise: float = 0.0) -> Whitening:
    """T with T T' = S^+, the Moore-Penrose inverse of a positive semidefinite S, in float64.

    For a positive definite S (d, d), T = L^-T with its Cholesky factor L; otherwise T uses the eigenvalues above
    rounding, which moves them by `noise`, besides d 2^-52 of the largest by the factorisation itself.
    """
    S = S.double()
    L, failed = torch.linalg.cholesky_ex(S)
    if not bool(failed):
        smallest, largest, _ = extremes(S, L)
        if smallest > max(noise, len(S) * EPS * largest):
            identity = torch.eye(len(S), dtype=S.dtype, device=S.device)
            return Whitening(torch.linalg.solve_triangular(L.mT, identity, upper=True), largest / smallest, len(S))
    values, V = torch.linalg.eigh(S)
    floor = max(noise, len(S) * EPS * float(values.abs().max()))
    indefinite = bool(values[0] < -floor)
    # An eigenvalue below zero is noise, and one not half again as large may be noise too; see `solve_symmetric`.
    significant = values > max(floor, -1.5 * float(values[0]))
    F = V[:, significant] / values[significant].sqrt()
    # F = T Q' with T upper triangular: the QR factorisation of F' in reversed order.
    R = torch.linalg.qr(F.flip(0).T).R
    T = torch.nn.functional.pad(R, (0, 0, 0, len(S) - len(R))).T.flip(0, 1)
    positive = values[significant]
    return Whitening(T, float(positive.max() / positive.min()) if len(positive) else 1.0, len(positive), indefinite)


class FedFeCAMClient(ClosedFormClient):
    """Sums and second moments of the classes that the client holds."""

    method: FedFeCAM

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """n (c_t), S and T (M, held), sums of z and of h = z^tukey, and second moments of h in the columns of Q.

        Q has sum h h' of each class held, packed. If the power is 1, T is S and does not travel.
        """
        method, features, M = self.method, self.random_features(broadcast), self.dimension
        which = positions(client_data, broadcast["columns"])
        n = torch.bincount(which, minlength=len(broadcast["columns"]))
        # In a secure sum, columns of all classes have to be sent.
        held = list(range(len(n))) if self.context.sums else torch.nonzero(n).squeeze(1).tolist()
        S, T = (client_data.inputs.new_zeros(len(held), M) for _ in range(2))
        columns = []
        for place, number in enumerate(held):
            moments = client_data.inputs.new_zeros(M, M)
            for Z in features.blocks(client_data.inputs[which == number]):
                H = method.transformed(Z)
                S[place] += Z.sum(dim=0)
                T[place] += H.sum(dim=0)
                add_gram(moments, H)
            columns.append(packed(moments))
        upload = {"n": n.to(torch.int32), "S": S.T, "Q": torch.stack(columns, dim=1)}
        if method.tukey != 1:
            upload["T"] = T.T
        return Message(upload, groups=dict.fromkeys("STQ", which)), state


class FedFeCAMServer(ClosedFormServer):
    """Sums over clients and tasks; D_c(z) = r' Sigma_c^+ r, r = h/|h| - m_c/|m_c|, m_c = (mean of z)^tukey.

    Attributes:
        n: (C,) samples of each class.
        T: (M, C) sums of h; it is B if the power is 1.
        moments: (C, entries) second moments of h of each class, in `KEPT`.
    """

    method: FedFeCAM
    state: ClassVar[Sequence[str]] = ("n", "_T", "moments")
    by_class = ("B", "n", "_T")
    absorbs_late = True

    def __init__(self, method: FedFeCAM, context: Context) -> None:
        super().__init__(method, context)
        self.n = torch.zeros(0, dtype=torch.int64, device=context.device)
        self._T = self.zeros(self.dimension, 0)
        self.moments = torch.zeros(0, entries(self.dimension), dtype=KEPT, device=context.device)
        #: The whitening factors of the rows of `moments`, packed alike; which of them are out of date; what was found.
        self._factors = torch.zeros_like(self.moments)
        self._stale: set[int] = set()
        self._found: dict[int, Whitening] = {}

    @property
    def T(self) -> torch.Tensor:
        return self.B if self.method.tukey == 1 else self._T

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        if new := len(self.n) - len(self.moments):
            rows = self.moments.new_zeros(new, self.moments.shape[1])
            self.moments, self._factors = (torch.cat([saved, rows]) for saved in (self.moments, self._factors))

    def objection(self, upload: Message) -> str:
        held, sent = int((upload["n"] > 0).sum()), upload["S"].shape[1]
        if self.context.sums or held == sent:
            return ""
        return f"S has {sent} columns, and n says that {held} classes have samples"

    def absorb(self, client: int, upload: Message) -> None:
        n = upload["n"].to(self.n)
        own = self.columns[n > 0]
        self.n[self.columns] += n
        if self.context.sums:
            upload = upload.with_tensors({name: upload[name][:, n > 0] for name in upload if name != "n"})
        self.B[:, own] += upload["S"]
        if "T" in upload:
            self._T[:, own] += upload["T"]
        self.moments[own] += upload["Q"].T.to(KEPT)
        self._stale.update(own.tolist())

    def solution(self) -> Solution:
        """The prototypes m_c/|m_c| as W, after a look at the covariances that changed."""
        for row in sorted(self._stale):
            self._found[row] = made = self._whitening(row)
            self._factors[row] = packed(made.factor)
        self._stale.clear()
        condition = max((made.condition for made in self._found.values()), default=1.0)
        means = self.method.transformed(self.B / self.n.clamp_min(1))
        return Solution(directions(means, dim=0), condition, self._trouble_found())

    def _whitening(self, row: int) -> Whitening:
        """The factor for the shrunk and scaled covariance of class `row`; the identity for one sample."""
        method, n = self.method, self.n[row : row + 1].double()
        freedom = float(n - 1)
        roots = self.T[:, row : row + 1].double() / n.sqrt()
        second = symmetric(self.moments[row].double())
        rounding = relative_rounding(self.context.dtype, self.context.wire.dtype, KEPT)
        S = scatter(second, roots @ roots.T, rounding)
        if freedom < 1 or not bool(S.any()):
            return whitening(torch.eye(len(S)).to(S))
        S /= freedom
        for _ in range(method.shrinkings):
            S = shrunk(S, method.a1, method.a2)
        errors = second.abs() * ((rounding + 8 * EPS) / freedom)
        s = deviations(S)
        errors = errors / s / s.unsqueeze(1)
        # Independent errors in a matrix move its eigenvalues by sqrt(d) times their size, not by d times.
        return whitening(correlations(S), float(torch.linalg.matrix_norm(errors) / len(errors) ** 0.5))

    def _trouble_found(self) -> str:
        """A warning about covariances that are not positive definite; "": all are."""
        short = [made for made in self._found.values() if made.rank < self.dimension]
        if not short:
            return ""
        ranks = [made.rank for made in short]
        indefinite = sum(made.indefinite for made in short)
        and_so = f", {indefinite} of them indefinite," if indefinite else ""
        return (
            f"covariances are singular to rounding: {len(short)} of {len(self._found)}{and_so} with ranks {min(ranks)}"
            f" to {max(ranks)} of {self.dimension}; Moore-Penrose inverse; a larger method.a1, and method.a2 no larger"
            " than it, would make them definite"
        )

    def scores(self, H: torch.Tensor) -> torch.Tensor:
        """-D (n, C); the lowest number for classes without a sample."""
        scores = -self._distances(directions(self.method.transformed(H), dim=1)).T
        return scores.masked_fill(self.n == 0, torch.finfo(scores.dtype).min)

    def _distances(self, U: torch.Tensor) -> torch.Tensor:
        """D (C, n) of samples with directions U (n, M)."""
        D = U.new_zeros(len(self.n), len(U))
        for number in torch.nonzero(self.n).squeeze(1).tolist():
            factor = triangular(self._factors[number])  # products in the type that it is stored in
            D[number] = ((U - self.W[:, number]).to(factor.dtype) @ factor).square().sum(dim=1)
        return D

    def model(self) -> dict[str, torch.Tensor]:
        """W, n and the packed whitening factors."""
        return {**super().model(), "n": self.n, "whitening": self._factors}

    def load_model(self, model: dict[str, torch.Tensor], tasks: Sequence[Task]) -> None:
        super().load_model(model, tasks)
        self.n, self._factors = model["n"], model["whitening"]

    def restored(self) -> None:
        self._factors = torch.zeros_like(self.moments)
        self._stale, self._found = set(torch.nonzero(self.n).squeeze(1).tolist()), {}
        super().restored()


def entries(M: int) -> int:
    """Numbers in one covariance."""
    return M * (M + 1) // 2


def directions(vectors: torch.Tensor, dim: int) -> torch.Tensor:
    """Each vector over its length; zero where it is zero."""
    return torch.nn.functional.normalize(vectors, dim=dim, eps=torch.finfo(vectors.dtype).tiny)


@dataclass
class FedFeCAM(ClosedFormMethod):
    name: ClassVar[str] = "fedfecam"
    search: ClassVar[Mapping[str, str]] = {"a1": "log(0.01,100)", "a2": "log(0.01,100)"}
    client_half = FedFeCAMClient
    server_half = FedFeCAMServer
    ignores_partition = True

    M: int | None = knob(None, least=1)
    tukey: float = knob(0.5, above=0, most=1, words="above 0, at most 1 (none)")
    a1: float = knob(1.0, least=0)
    a2: float = knob(1.0, least=0)
    shrinkings: int = knob(2, least=0)

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        side, combine = ("c", SUM) if context.sums else ("held", EACH)
        sums = real("M", side, combine=combine, leaks=SUMS, zero_without="n" if context.sums else "")
        Q = real(entries(self.dimension(context)), side, form="packed grams", combine=combine, leaks=MOMENTS)
        fields = {"n": counts("c", combine=SUM), "S": sums, "Q": Q}
        return {"statistics": fields if self.tukey == 1 else {**fields, "T": sums}}

    def transformed(self, Z: torch.Tensor) -> torch.Tensor:
        """Z^tukey, of each entry."""
        if self.tukey == 1:
            return Z
        if Z.numel() and (least := float(Z.min())) < 0:
            raise UserError(
                f"method.tukey={self.tukey:g} takes features that are not negative, and here is one of {least:.3g}",
                "method.tukey=1, or ReLU features, which are not: method.M=2048 method.activation=relu",
            )
        return Z.sqrt() if self.tukey == 0.5 else Z.pow(self.tukey)

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        M, classes = self.dimension(context), context.all_classes(classes_per_task)
        key, each = f"method=fedfecam on {M} features", entries(M)
        require_memory(key, 2 * classes * each * KEPT.itemsize, f"{classes} covariances")
        require_memory(key, 8 * max(classes_per_task) * each, "one upload")
