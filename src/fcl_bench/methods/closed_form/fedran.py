"""FedRAN: federated random-feature analytic continual learning (papers: "Accurate and Resource-Efficient FCL").

One round per task. Each client sends a truncated SVD of its random features and its exact class sums; the server merges
the summaries over clients and then over tasks, and solves ridge regression in the subspace it kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.errors import UserError
from fcl_bench.linalg.gram import class_sums, product
from fcl_bench.linalg.solve import DOUBTFUL, Solution, ill_conditioned, relative_rounding
from fcl_bench.linalg.spectral import Spectrum, summarise
from fcl_bench.methods.closed_form.algebra.merging import MERGES, Losses, Merger, Part, merges_objection
from fcl_bench.methods.closed_form.algebra.ridge import GCV
from fcl_bench.methods.closed_form.algebra.ridge import Spectrum as Eigenvalues
from fcl_bench.methods.closed_form.base import positions
from fcl_bench.methods.closed_form.bounds import FedRANAudit
from fcl_bench.methods.closed_form.ridge import RegularisedServer, RidgeClient, RidgeMethod, ridge_knob
from fcl_bench.protocol.audit import Audit
from fcl_bench.protocol.combining import Combination, as_one, total
from fcl_bench.protocol.context import ClientData, Context, State, Task, WireFormat, column_bytes, factor_bytes
from fcl_bench.protocol.fields import CLASSES, MOMENTS, SUM, SUMS, Schema, descending, orthonormal, real
from fcl_bench.protocol.message import SAMPLES_BYTES, Message


def upload_bytes(M: int, rank: int, classes: int, wire: WireFormat) -> int:
    """Size of a full upload: V (M, r), sigma (r,), B (M, c) (Eq. 11), and with `wire.columns=held` B's numbers."""
    direction = factor_bytes(M, wire) + column_bytes(None, wire.dtype)
    numbers = 4 * (1 + classes) if wire.columns == "held" else 0
    return rank * direction + classes * column_bytes(M, wire.dtype) + numbers


def pseudo_labels(Z: torch.Tensor, labels: torch.Tensor, U: torch.Tensor, threshold: float) -> torch.Tensor:
    """The class of the most similar prototype of each unlabelled sample, if it is similar enough (Eq. 13-15).

    A prototype is the mean of a class's labelled features. A feature of zero norm has no direction: as a sample it is
    never accepted, as a prototype never chosen.

    Args:
        Z: (n, d) labelled backbone features.
        labels: (n,) their classes, any integers from 0.
        U: (m, d) unlabelled backbone features.
        threshold: tau, the least cosine similarity.

    Returns:
        (m,) int64, -1 where no label is accepted.
    """
    rejected = torch.full((len(U),), -1, dtype=torch.int64, device=U.device)
    if len(Z) == 0 or len(U) == 0:
        return rejected
    classes, members = labels.unique(return_inverse=True)
    sums = torch.nn.functional.one_hot(members, len(classes)).to(Z).T @ Z
    norms = sums.norm(dim=1)  # of the sums, not the means: a prototype's length does not matter
    usable = norms > 0
    if not bool(usable.any()):
        return rejected
    prototypes = sums[usable] / norms[usable].unsqueeze(1)
    lengths = U.norm(dim=1)
    similarity, nearest = (U @ prototypes.T / lengths.clamp_min(torch.finfo(U.dtype).tiny).unsqueeze(1)).max(dim=1)
    accepted = (similarity >= threshold) & (lengths > 0)
    return torch.where(accepted, classes[usable][nearest], rejected)


class FedRANClient(RidgeClient):
    """Random features, thin SVD, class sums (Alg. 1, lines 7-13). The client keeps nothing but the projection."""

    method: FedRAN

    def pseudo_labels(self, client_data: ClientData) -> torch.Tensor | None:
        """Labels from the prototypes of the labelled backbone features (Alg. 4)."""
        if not self.method.ssl:
            return None
        return pseudo_labels(client_data.inputs, client_data.labels, client_data.unlabelled, self.method.tau)

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """V (M, r_kt), sigma (r_kt,) and B (M, c_t), the exact class sums over the task's classes."""
        H = self.features(client_data, broadcast)
        columns = broadcast["columns"]
        (V, sigma), _ = summarise(H, self.method.feasible_rank(self.context, len(columns)))
        B = class_sums(H, positions(client_data, columns), len(columns))
        return Message({"V": V, "sigma": sigma, "B": B}, samples=self.reported_samples(client_data)), state


def take_summary(merger: Merger, upload: Message, limit: int) -> float:
    """Give a merger an upload's summary and earlier losses. Returns the largest eigenvalue at which the upload was cut.

    In `MERGES` are four numbers, for the bounds and for `complement=floor`: over all merges of a tree's nodes so far,
    the sum of the first dropped eigenvalues, the largest share dropped and the most truncations of one upload; and the
    largest eigenvalue at which a client cut off.

    Args:
        limit: the most directions that the summary may have; with fewer, nothing was cut off.
    """
    sigma = upload["sigma"]
    cut = float(sigma[-1]) ** 2 if len(sigma) and len(sigma) == limit else 0.0
    truncations = 0
    if MERGES in upload:
        first, share, most, before = upload[MERGES].tolist()
        merger.losses.include(first, share)
        truncations, cut = int(most), max(cut, before)
    merger.add(Spectrum(upload["V"], sigma), truncations)
    return cut


class FedRANServer(RegularisedServer):
    """Spatial merge over clients, temporal merge over tasks, exact B, ridge in the subspace (Alg. 1, lines 15-23).

    Attributes:
        V, sigma: (M, r) and (r,), the sketch of everything so far.
        truncations: the most truncating merges that any one upload went through (L_t).
        losses: what all merges so far dropped.
        floor: the larger of the smallest kept eigenvalue and the largest eigenvalue at which a client cut off. The
            latter is larger where a byte budget makes clients cut off long before the server does.
    """

    method: FedRAN
    state: ClassVar[Sequence[str]] = ("V", "sigma", "truncations", "losses", "_merged", "_rank", "_cut")
    absorbs_late = True

    def __init__(self, method: FedRAN, context: Context) -> None:
        super().__init__(method, context)
        self.V, self.sigma = self.zeros(self.dimension, 0), self.zeros(0)
        self.truncations, self.losses = 0, Losses()
        self._merged = False
        self._rank = 0 if method.rank is None else min(method.rank, self.dimension)
        self._cut = 0.0
        self._spatial = self._merger()

    @property
    def sketch(self) -> Spectrum:
        """V and sigma."""
        return Spectrum(self.V, self.sigma)

    def _merger(self) -> Merger:
        return Merger(self._rank, self.method.merge == "joint", self.losses)

    @property
    def floor(self) -> float:
        smallest = float(self.sigma[-1]) ** 2 if len(self.sigma) else 0.0
        return max(smallest, self._cut)

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        # A byte budget binds uploads, not what the server keeps, so a task with many classes never shrinks the state.
        self._rank = max(self._rank, self.method.feasible_rank(self.context, len(task.columns)))
        self._spatial = self._merger()

    def gram(self) -> torch.Tensor:
        """The estimate of the Gram matrix, V diag(sigma^2) V' (M, M)."""
        return (self.V * self.sigma.square()) @ self.V.T

    def schema(self, task: Task, stage: str) -> Schema:
        fields, limit = super().schema(task, stage), self.method.feasible_rank(self.context, len(task.columns))
        return {**fields, "V": replace(fields["V"], widest=limit)}

    def objection(self, upload: Message) -> str:
        return super().objection(upload) or merges_objection(upload)

    def absorb(self, client: int, upload: Message) -> None:
        self.samples += upload.samples or 0
        self.add_class_sums(upload["B"])
        limit = self.method.feasible_rank(self.context, upload["B"].shape[1])
        self._cut = max(self._cut, take_summary(self._spatial, upload, limit))

    def finish_task(self) -> None:
        if arrived := self._spatial.parts():
            before = Part(self.sketch, self.truncations, self._merged)
            (self.V, self.sigma), self.truncations, self._merged = self.losses.merged([before, *arrived], self._rank)
        super().finish_task()

    def trace(self) -> float:
        values, _, multiplicity = self.spectrum()
        return float(values @ multiplicity)

    def spectrum(self) -> Eigenvalues:
        """That of V diag(s^2) V', outside of which W is zero; with the floor, of the floored sketch on all of space."""
        V, sigma = self.V.double(), self.sigma.double()
        floor = self.floor if self.method.complement == "floor" else 0.0
        energies = (V.T @ self.B.double()).square().sum(dim=1)
        found = Eigenvalues(sigma.square().clamp_min(floor), energies, torch.ones_like(sigma))
        rest = float(self.B.double().square().sum() - energies.sum()) if floor else 0.0
        return found.with_rest(floor, rest, self.dimension - len(sigma))

    def solution(self) -> Solution:
        """W = V (diag(s^2) + lambda I)^-1 V'B (Eq. 29): ridge regression within the span of V.

        With the floor f, W = V (max(s^2, f) + lambda)^-1 V'B + (I - V V')B / (f + lambda).
        """
        ridge, V, sigma, B = self.ridge, self.V, self.sigma, self.B
        if len(sigma) == 0:
            return Solution(torch.zeros_like(B), 1.0)
        # The rounding of V'B in a direction of small sigma, if V is orthonormal to rounding and B large in others.
        noise = (self.dimension * 2**-52 + relative_rounding(self.context.dtype)) * float(sigma[0]) ** 2
        # Outside the subspace B may be nothing but rounding, which must not be divided by a tiny number.
        floor = max(self.floor, noise) if self.method.complement == "floor" else 0.0
        sigma = sigma.clamp_min(floor**0.5)
        W = product(V, (V.T @ B) / (sigma.square() + ridge).unsqueeze(1))
        if floor:
            # B outside the range of V. Twice, since once leaves rounding errors of the size of B.
            rest, basis = B.double(), V.double()
            for _ in range(2):
                rest = rest - basis @ (basis.T @ rest)
            W = W + rest.to(B.dtype) / (floor + ridge)
        largest, smallest = float(sigma[0]) ** 2 + ridge, float(sigma[-1]) ** 2 + ridge
        condition = largest / smallest
        doubtful = noise > DOUBTFUL * smallest
        return Solution(W, condition, ill_conditioned(condition, largest / noise) if doubtful else "")

    def restored(self) -> None:
        # Column-major, as `merge` leaves it: a product may round by layout, and a resumed run has to be the same.
        self.V = self.V.T.contiguous().T
        super().restored()


@dataclass
class FedRAN(RidgeMethod):
    name: ClassVar[str] = "fedran"
    revision: ClassVar[int] = 2
    client_half = FedRANClient
    server_half = FedRANServer
    in_tables = True

    rank: int | None = knob(512, least=1)
    ridge: float | str = ridge_knob(1e-3, above=0)
    merge: str = knob("sequential", choices=("sequential", "joint"))
    budget_bytes: int | None = None
    complement: str = knob("drop", choices=("drop", "floor"))
    ssl: bool = False
    tau: float = knob(0.5, least=-1, most=1, words="a cosine, -1 to 1", of="ssl")
    bounds: bool = False

    def matrices(self) -> int:
        # The exact solution's, if it is requested.
        return 3 if self.bounds else 0

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        M = self.dimension(context)
        if self.rank is not None and self.rank > M:
            raise UserError(f"method.rank={self.rank} is more than the {M} features", f"1 to {M}, or a larger method.M")
        if self.budget_bytes is not None:
            most = max(classes_per_task)
            if self.feasible_rank(context, most) < 1:
                least = self.full_upload(context, 1, most)
                raise UserError(
                    f"method.budget_bytes={self.budget_bytes} does not hold one direction and {most} class sums",
                    f"at least {least} with M={M} and wire.dtype={context.wire}",
                )

    def audits(self, context: Context) -> Mapping[str, Audit]:
        return {"bounds": FedRANAudit(self, context)} if self.bounds else {}

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        B = real("M", "c", least=self.least_feature, combine=SUM, columns=CLASSES, leaks=SUMS)
        V = orthonormal("M", "r", unit=True, leaks=MOMENTS)
        return {"statistics": {"V": V, "sigma": descending("r"), "B": B, MERGES: real(4, least=0, optional=True)}}

    def paper_values(self, context: Context, classes: int) -> int:
        """V, sigma and B at the nominal rank (Eq. 11)."""
        return self._values(context, self.feasible_rank(context, classes), classes)

    def fedran_values(self, context: Context, classes_per_task: Sequence[int]) -> int:
        """At the largest rank of any task."""
        rank = max(self.feasible_rank(context, classes) for classes in classes_per_task)
        return self._values(context, rank, context.all_classes(classes_per_task))

    def _values(self, context: Context, rank: int, classes: int) -> int:
        M = self.dimension(context)
        return M * rank + rank + M * classes

    def combination(self, context: Context) -> Combination:
        """The server's own merge of a task's clients, cut to the rank that one client may send; B adds up."""

        def combined(uploads: Sequence[Message]) -> Message:
            limit = self.feasible_rank(context, uploads[0]["B"].shape[1])
            merger = Merger(limit, self.merge == "joint")
            cut = max(take_summary(merger, upload, limit) for upload in uploads)
            part = merger.result()
            V, sigma = part.summary
            merges = sigma.new_tensor([merger.losses.first, merger.losses.share, part.truncations, cut])
            return as_one(uploads, {"V": V, "sigma": sigma, "B": total(uploads, "B"), MERGES: merges})

        return combined

    def full_upload(self, context: Context, rank: int, classes: int) -> int:
        """Bytes of an upload of a client that holds all the task's classes, with what `gcv` needs to be told."""
        extra = SAMPLES_BYTES if self.penalty == GCV else 0
        return upload_bytes(self.dimension(context), rank, classes, context.wire) + extra

    def feasible_rank(self, context: Context, classes: int) -> int:
        """r for an upload with `classes` class sums: `rank`, M, and what the byte budget allows (Eq. 12)."""
        M = self.dimension(context)
        rank = M if self.rank is None else self.rank
        if self.budget_bytes is not None:
            fixed = self.full_upload(context, 0, classes)
            per_direction = self.full_upload(context, 1, classes) - fixed
            rank = min(rank, (self.budget_bytes - fixed) // per_direction)
        return min(rank, M)
