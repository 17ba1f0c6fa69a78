"""Centred sketch: fcl-bench's own method, STSA's classifier from a small fraction of its bytes.

It changes three things in FedRAN. Every client sends class sums anyway; with counts they give the between-class part
of its Gram matrix exactly, so only the deviations from the class means are sketched. What the sketch drops is not zero:
one more number, the mean of the dropped eigenvalues, is spread over the other directions. And the server keeps the sum
of the sketches, at whatever rank that has.

With `remainder=gaussian` what the sketches drop is not spread evenly, but in the shape of the covariance that random
features of Gaussian classes have. Their parameters, class sums of the backbone's features and a few directions of each
class's own covariance, are sent too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.errors import UserError, require_memory
from fcl_bench.linalg.gram import add_gram, class_sums
from fcl_bench.linalg.spectral import Spectrum, summarise
from fcl_bench.methods.closed_form.algebra.class_scatter import ClassScatter, class_sketches
from fcl_bench.methods.closed_form.algebra.merging import MERGES, merges_objection
from fcl_bench.methods.closed_form.algebra.random_features import relu_covariance
from fcl_bench.methods.closed_form.algebra.remainder import Sketch, add_sketches, deviations, leading, noise_level
from fcl_bench.methods.closed_form.base import ClosedFormClient, counted, positions
from fcl_bench.methods.closed_form.bounds import CentredSketchAudit
from fcl_bench.methods.closed_form.ridge import RidgeMethod, RidgeServer, ridge_knob
from fcl_bench.protocol.audit import Audit
from fcl_bench.protocol.combining import Combination, as_one, total
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import CLASSES, SUM, SUMS, Field, Schema, counts, descending, orthonormal, real
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Server

#: By how much the wire may change the length of a unit vector.
_ROUNDED = 0.01


class CentredSketchClient(ClosedFormClient):
    """Class sums, counts, and the sketch of the deviations from the class means."""

    method: CentredSketch

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """V (M, r), sigma (r), S (M, c_t), the counts n (c_t), and tau (1), or E = ||A||_F^2 (1) and `_of_inputs`."""
        H, columns = self.features(client_data, broadcast), broadcast["columns"]
        which = positions(client_data, columns)
        S = class_sums(H, which, len(columns))
        A = deviations(H, which, S)
        V, sigma = leading(A, self.method.rank)
        upload = {"V": V, "sigma": sigma, "S": S, "n": counted(client_data, columns)}
        if self.method.remainder == "isotropic":
            return Message({**upload, "tau": A.new_tensor([noise_level(A, sigma)])}), state
        upload["E"] = A.square().sum().reshape(1)
        return Message({**upload, **self._of_inputs(client_data.inputs, which, len(columns))}), state

    def _of_inputs(self, Z: torch.Tensor, which: torch.Tensor, classes: int) -> dict[str, torch.Tensor]:
        """S_z (d, c_t), D_z (d, 1), and of each class k_c directions U (d, k), their lengths (k), k_c and E_z (c_t)."""
        sums = class_sums(Z, which, classes)
        A = deviations(Z, which, sums)
        U, lengths, widths, energies = class_sketches(A, which, classes, self.method.class_rank)
        # A matrix, which a 16-bit wire sends in 16 bits.
        diagonal = A.square().sum(dim=0).unsqueeze(1)
        return {"S_z": sums, "U": U, "lengths": lengths, "widths": widths, "E_z": energies, "D_z": diagonal}


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
        super().__init__(method, context, low_rank=method.remainder == "isotropic")
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


class GaussianRemainderServer(CentredSketchServer):
    """G += V sigma^2 V' + sum_c S_c S_c'/n_c + e [(1 - mix) Pi Q Pi / tr(Pi Q Pi) + mix Pi / (M - r)], Pi = I - V V'.

    Q is the covariance that the task's random features would have if its classes were Gaussian, with the task's means
    and covariances of the classes. What is not known of a class's own covariance has the shape of Sigma, the mean of
    all classes so far. The sketches of a task wait for its end, when Q is known. delta has what is added evenly, as in
    the base.

    Attributes:
        scatter: N Sigma (d, d), the sum over all uploads so far of U lengths^2 U' with D_z for its diagonal.
        classes: what the uploads of the task at hand say of each class's own covariance.
        Q: (M, M), of the last task; only kept for `bounds`.
    """

    state: ClassVar[Sequence[str]] = ("scatter",)
    #: Q needs all of a task's uploads together.
    absorbs_late = False

    def __init__(self, method: CentredSketch, context: Context) -> None:
        super().__init__(method, context)
        self.scatter = self.zeros(context.inputs, context.inputs)
        self.Q = self.zeros(0, 0)
        self._sketches: list[Sketch] = []

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self._sketches = []
        self._sums = self.zeros(self.context.inputs, len(task.columns))
        self._sizes = torch.zeros(len(task.columns), dtype=torch.int64, device=self.context.device)
        self.classes = ClassScatter(self.scatter, len(task.columns))

    def objection(self, upload: Message) -> str:
        lengths, widths = torch.linalg.vector_norm(upload["U"], dim=0), int(upload["widths"].sum())
        if len(lengths) != widths:
            return f"U has {len(lengths)} columns, widths speaks of {widths}"
        if bool(((lengths - 1).abs() > _ROUNDED).any()):
            return "U has a column that is not of length 1"
        return super().objection(upload)

    def absorb(self, client: int, upload: Message) -> None:
        V, sigma = upload["V"], upload["sigma"]
        # If a sketch drops nothing, rounding may make this difference slightly negative.
        self._sketches.append(Sketch(V, sigma, max(float(upload["E"] - sigma.square().sum()), 0.0)))
        self.estimate.add_factor(between(upload))
        self.add_class_sums(upload["S"])
        self._sums += upload["S_z"]
        factors = upload["U"] * upload["lengths"]
        self.classes.add(factors, upload["widths"], upload["E_z"])
        add_gram(self.scatter, factors.T)
        # Except for rounding on the wire, no entry of the sketches' own diagonal is larger than D_z's.
        rest = upload["D_z"].squeeze(1) - factors.square().sum(dim=1)
        self.scatter.diagonal().add_(rest.clamp_min(0))
        self._sizes += upload["n"]
        self.samples += int(upload["n"].sum())
        self.count(upload)

    def finish_task(self) -> None:
        if self._sketches:
            Sigma, P = self.scatter / self.samples, self.random_features.projection
            assert P is not None  # `check` wants an M
            own = self.classes.beside(Sigma, self._sizes, self.method.class_rank)
            Q = relu_covariance(P, Sigma, own, self._sums / self._sizes.clamp_min(1), self._sizes)
            self.delta += add_sketches(self.estimate.matrix, self._sketches, Q, self.method.mix)
            self.Q = Q if self.method.bounds else self.Q
            self._sketches = []
        super().finish_task()


@dataclass
class CentredSketch(RidgeMethod):
    """Knobs of the centred sketch: see conf/method/centred_sketch.yaml."""

    name: ClassVar[str] = "centred_sketch"
    client_half = CentredSketchClient
    server_half = CentredSketchServer
    in_tables = True
    counts_samples = True
    search: ClassVar[Mapping[str, str]] = {**RidgeMethod.search, "remainder": "isotropic,gaussian"}

    rank: int = knob(16, least=0)
    ridge: float | str = ridge_knob(1e-3, above=0)
    remainder: str = knob("isotropic", choices=("isotropic", "gaussian"))
    class_rank: int = knob(16, least=0)
    mix: float = knob(0.3, least=0, most=1, words="a share, 0 to 1")
    bounds: bool = False

    def matrices(self) -> int:
        # Q itself, and two more while it is made.
        return super().matrices() + (3 if self.remainder == "gaussian" else 0)

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        M = self.dimension(context)
        if self.rank > M:
            raise UserError(f"method.rank={self.rank} is more than the {M} features", f"0 to {M}")
        if self.remainder == "isotropic":
            return
        if self.M is None or self.activation != "relu":
            raise UserError("method.remainder=gaussian needs random features of ReLU", "method.remainder=isotropic")
        if self.class_rank > context.inputs:
            raise UserError(
                f"method.class_rank={self.class_rank} is more than the backbone's {context.inputs} features",
                f"0 to {context.inputs}",
            )
        pairs = self.class_rank * (self.class_rank + 1) // 2
        size = 8 * max(classes_per_task) * (M * pairs + context.inputs**2)
        require_memory(f"method.class_rank={self.class_rank}", size, "the covariances of a task's classes")
        size = 8 * (context.clients or 0) * M * self.rank
        require_memory(
            f"method.rank={self.rank}", size, f"the factors of {context.clients} clients, kept until a task ends"
        )

    def audits(self, context: Context) -> Mapping[str, Audit]:
        return {"bounds": CentredSketchAudit(self, context)} if self.bounds else {}

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        def sums(side: str, least: float | None) -> Field:
            return real(side, "c", least=least, combine=SUM, columns=CLASSES, leaks=SUMS, zero_without="n")

        # A deviation from the mean of one sample is 0, so no sketch of deviations reveals a single sample.
        sketch = {"V": orthonormal("M", "r", widest=self.rank, unit=True), "sigma": descending("r")}
        fields = {**sketch, "S": sums("M", self.least_feature), "n": counts("c", combine=SUM)}
        one = real(1, least=0)
        if self.remainder == "isotropic":
            return {"statistics": {**fields, "tau": one, MERGES: replace(one, optional=True)}}
        inputs = {
            **{"S_z": sums("d", None), "D_z": real("d", 1, least=0), "E_z": real("c", least=0)},
            **{"U": real("d", "k", unit=True), "lengths": real("k", least=0)},
            "widths": Field(("c",), "whole", 0, self.class_rank + 1),
        }
        return {"statistics": {**fields, "E": one, **inputs}}

    def paper_values(self, context: Context, classes: int) -> int:
        """V, sigma, S, n and tau, and with the Gaussian remainder S_z, D_z, and of each class U, lengths, k_c, E_z."""
        values = self.dimension(context) * (self.rank + classes) + self.rank + 1 + classes
        if self.remainder == "gaussian":
            d, k = context.inputs, self.class_rank * classes
            values += d * (k + classes) + k + d + 2 * classes
        return values

    def combination(self, context: Context) -> Combination | None:
        """`merged_sketch`, and sums of the other fields. None with `gaussian`: its remainder is of one sketch."""

        def combined(uploads: Sequence[Message]) -> Message:
            (V, sigma), tau, error = merged_sketch(uploads, self.rank)
            error += sum(float(upload[MERGES]) for upload in uploads if MERGES in upload)
            sums = {name: total(uploads, name) for name in ("S", "n")}
            return as_one(uploads, {"V": V, "sigma": sigma, "tau": tau, **sums, MERGES: tau.new_tensor([error])})

        return combined if self.remainder == "isotropic" else None

    def server(self, context: Context) -> Server:
        return (CentredSketchServer if self.remainder == "isotropic" else GaussianRemainderServer)(self, context)
