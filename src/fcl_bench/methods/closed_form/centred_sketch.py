"""Centred sketch: fcl-bench's own method, STSA's classifier from a small fraction of its bytes.

It changes three things in FedRAN. Every client sends class sums anyway; with counts they give the between-class part
of its Gram matrix exactly, so only the deviations from the class means are sketched. What the sketch drops is not zero:
one more number, the mean of the dropped eigenvalues, is spread over the other directions. And the server keeps the sum
of the sketches, at whatever rank that has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.errors import UserError
from fcl_bench.linalg.gram import class_sums
from fcl_bench.linalg.spectral import Spectrum, summarise
from fcl_bench.methods.closed_form.algebra.merging import MERGES, merges_objection
from fcl_bench.methods.closed_form.algebra.remainder import deviations, leading, noise_level
from fcl_bench.methods.closed_form.base import ClosedFormClient, counted, positions
from fcl_bench.methods.closed_form.bounds import CentredSketchAudit
from fcl_bench.methods.closed_form.ridge import RidgeMethod, RidgeServer, ridge_knob
from fcl_bench.protocol.audit import Audit
from fcl_bench.protocol.combining import Combination, as_one, total
from fcl_bench.protocol.context import ClientData, Context, State
from fcl_bench.protocol.fields import CLASSES, SUM, SUMS, Field, Schema, counts, descending, orthonormal, real
from fcl_bench.protocol.message import Message


class CentredSketchClient(ClosedFormClient):
    """Class sums, counts, and the sketch of the deviations from the class means."""

    method: CentredSketch

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """V (M, r), sigma (r), S (M, c_t), the counts n (c_t), and tau (1)."""
        H, columns = self.features(client_data, broadcast), broadcast["columns"]
        which = positions(client_data, columns)
        S = class_sums(H, which, len(columns))
        A = deviations(H, which, S)
        V, sigma = leading(A, self.method.rank)
        tau = A.new_tensor([noise_level(A, sigma)])
        return Message({"V": V, "sigma": sigma, "S": S, "n": counted(client_data, columns), "tau": tau}), state


def merged_sketch(uploads: Sequence[Message], rank: int) -> tuple[Spectrum, torch.Tensor, float]:
    """One sketch of the deviations from the pooled class means, and what is dropped on the way.

    The estimates of the uploads, V (diag(sigma^2) - tau I) V' + tau I, add up. The pooled class means take the place of
    each client's own, so the difference between the clients' means of a class,
    sum_k n_kc (m_kc - m_c)(m_kc - m_c)', is a deviation too. The leading part stays, and the mean of what it drops is
    spread evenly, as a client does. So the estimate is off by at most max(lambda_{r+1} - level, level) in the spectral
    norm, `level` being that mean and lambda_{r+1} the first dropped eigenvalue.

    Returns:
        V and sigma, tau (1), and that error.
    """
    tau = sum(float(upload["tau"]) for upload in uploads)
    parts = [weighted(upload) for upload in uploads]
    means = total(uploads, "S") / total(uploads, "n").clamp_min(1)
    for upload in uploads:
        n = upload["n"].to(means)
        parts.append((upload["S"] / n.clamp_min(1) - means)[:, n > 0] * n[n > 0].sqrt())
    A = torch.cat(parts, dim=1).T
    (V, sigma), residual = summarise(A, rank)
    level = noise_level(A, sigma)
    found = Spectrum(V, (sigma.square() + tau).sqrt())
    return found, A.new_tensor([tau + level]), max(residual - level, level)


def weighted(upload: Message) -> torch.Tensor:
    """The columns sqrt(sigma^2 - tau) V (M, r) of a sketch.

    Except for rounding on the wire, a retained eigenvalue is at least the mean of the dropped ones.
    """
    return upload["V"] * (upload["sigma"].square() - float(upload["tau"])).clamp_min(0).sqrt()


def between(upload: Message) -> torch.Tensor:
    """The columns S_c / sqrt(n_c) (M, m) of the classes that the client holds: the between-class part is FF'."""
    held = upload["n"] > 0
    return upload["S"][:, held] / upload["n"][held].to(upload["S"]).sqrt()


class CentredSketchServer(RidgeServer):
    """G += V (diag(sigma^2) - tau I) V' + sum_c S_c S_c'/n_c, delta += tau; W = (G + (delta + lambda) I)^-1 B.

    Attributes:
        delta: the energy per direction that the uploads so far dropped.
        merge_error: by how much, in the spectral norm, the merges of a tree's nodes may have moved the estimate.
    """

    method: CentredSketch
    state: ClassVar[Sequence[str]] = ("delta", "merge_error")
    sums_what_came = False
    absorbs_late = True

    def __init__(self, method: CentredSketch, context: Context) -> None:
        super().__init__(method, context, low_rank=True)
        self.delta = self.merge_error = 0.0

    def gram(self) -> torch.Tensor:
        """The estimate of the Gram matrix, G + delta I (M, M)."""
        return self.estimate.matrix + self.delta * torch.eye(self.dimension).to(self.B)

    def objection(self, upload: Message) -> str:
        return super().objection(upload) or merges_objection(upload)

    def absorb(self, client: int, upload: Message) -> None:
        self.estimate.add_factor(torch.cat([weighted(upload), between(upload)], dim=1))
        self.delta += float(upload["tau"])
        self.merge_error += float(upload[MERGES]) if MERGES in upload else 0.0
        self.count(upload)
        self.samples += int(upload["n"].sum())
        self.add_class_sums(upload["S"])

    def offset(self) -> float:
        return self.delta


@dataclass
class CentredSketch(RidgeMethod):
    """Knobs of the centred sketch: see conf/method/centred_sketch.yaml."""

    name: ClassVar[str] = "centred_sketch"
    client_half = CentredSketchClient
    server_half = CentredSketchServer
    in_tables = True
    counts_samples = True

    rank: int = knob(16, least=0)
    ridge: float | str = ridge_knob(1e-3, above=0)
    bounds: bool = False

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        M = self.dimension(context)
        if self.rank > M:
            raise UserError(f"method.rank={self.rank} is more than the {M} features", f"0 to {M}")

    def audits(self, context: Context) -> Mapping[str, Audit]:
        return {"bounds": CentredSketchAudit(self, context)} if self.bounds else {}

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        def sums(side: str, least: float | None) -> Field:
            return real(side, "c", least=least, combine=SUM, columns=CLASSES, leaks=SUMS, zero_without="n")

        # A deviation from the mean of one sample is 0, so no sketch of deviations reveals a single sample.
        sketch = {"V": orthonormal("M", "r", widest=self.rank, unit=True), "sigma": descending("r")}
        fields = {**sketch, "S": sums("M", self.least_feature), "n": counts("c", combine=SUM)}
        one = real(1, least=0)
        return {"statistics": {**fields, "tau": one, MERGES: replace(one, optional=True)}}

    def paper_values(self, context: Context, classes: int) -> int:
        """V, sigma, S, n and tau."""
        return self.dimension(context) * (self.rank + classes) + self.rank + 1 + classes

    def combination(self, context: Context) -> Combination:
        """`merged_sketch`, and sums of the other fields."""

        def combined(uploads: Sequence[Message]) -> Message:
            (V, sigma), tau, error = merged_sketch(uploads, self.rank)
            error += sum(float(upload[MERGES]) for upload in uploads if MERGES in upload)
            sums = {name: total(uploads, name) for name in ("S", "n")}
            return as_one(uploads, {"V": V, "sigma": sigma, "tau": tau, **sums, MERGES: tau.new_tensor([error])})

        return combined
