"""Centred sketch: fcl-bench's own method, STSA's classifier from a small fraction of its bytes.

Three changes to FedRAN. The class sums that every client sends anyway, with their counts, give the between-class part
of its Gram matrix exactly, so only the deviations from the class means are sketched. What the sketch drops is not zero:
one more number, the mean of the dropped eigenvalues, is spread over the other directions. And the server keeps the sum
of the sketches, at whatever rank that has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.errors import UserError
from fcl_bench.linalg.gram import class_sums
from fcl_bench.linalg.spectral import Spectrum, summarise
from fcl_bench.methods.closed_form.base import (
    ClosedFormClient,
    ClosedFormMethod,
    RidgeServer,
    positions,
    ridge_knob,
    sums_without_samples,
)
from fcl_bench.protocol.expected import Expectation, counts, real
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.problem import Problem, Shard, State
from fcl_bench.protocol.task import Task


def deviations(H: torch.Tensor, which: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """A (n, M): the rows of H (n, M) minus the mean of their class, for the class sums (M, c) of H by `which` (n,)."""
    means = sums / torch.bincount(which, minlength=sums.shape[1]).clamp_min(1)
    return H - means.T[which]


def noise_level(A: torch.Tensor, sigma: torch.Tensor) -> float:
    """tau, the mean of the eigenvalues of A'A that a sketch with singular values `sigma` drops."""
    others = A.shape[1] - len(sigma)
    dropped = float(A.square().sum() - sigma.square().sum())
    return max(dropped, 0.0) / others if others else 0.0


class CentredSketchClient(ClosedFormClient):
    """Class sums, counts, and the sketch of what they don't tell."""

    method: CentredSketch

    def update(self, shard: Shard, broadcast: Message, state: State) -> tuple[Message, State]:
        """V (M, r), sigma (r), tau (1), S (M, c_t) and, if centred, the counts n (c_t)."""
        H, rank = self.features(shard, broadcast), self.method.rank
        columns = broadcast["columns"]
        which = positions(shard, columns)
        sums = class_sums(H, which, len(columns))
        A = deviations(H, which, sums) if self.method.centre else H
        # At rank 0 there is nothing to decompose, which is the point of it.
        V, sigma = summarise(A, rank)[0] if rank else Spectrum(H.new_zeros(H.shape[1], 0), H.new_zeros(0))
        tau = torch.tensor([noise_level(A, sigma)], dtype=H.dtype)
        upload = {"V": V, "sigma": sigma, "tau": tau, "S": sums}
        if self.method.centre:
            upload["n"] = torch.bincount(which, minlength=len(columns)).to(torch.int32)
        samples = None if self.method.centre else self.told(shard)
        return Message(upload, samples=samples, per_class=["S"], factors=["V"]), state


class CentredSketchServer(RidgeServer):
    """G += V (diag(sigma^2) - tau I) V' + sum_c S_c S_c'/n_c, delta += tau; W = (G + (delta + lambda) I)^-1 B.

    Attributes:
        delta: the energy per direction that the uploads so far dropped.
    """

    method: CentredSketch
    sums_what_came = False

    def __init__(self, method: CentredSketch, problem: Problem) -> None:
        super().__init__(method, problem, low_rank=True)
        self.delta = 0.0

    def gram(self) -> torch.Tensor:
        """The estimate of the Gram matrix, G + delta I (M, M)."""
        return self.estimate.matrix + self.delta * torch.eye(self.dimension).to(self.B)

    def expects(self, task: Task, round_: int) -> Expectation:
        M, classes = self.dimension, len(task.columns)
        fields = {"V": real(M, "r"), "sigma": real("r", least=0), "tau": real(1, least=0), "S": real(M, classes)}
        return {**fields, "n": counts(classes)} if self.method.centre else fields

    def objection(self, upload: Message) -> str:
        said = super().objection(upload)
        return said or (sums_without_samples(upload["S"], upload["n"]) if self.method.centre else "")

    def absorb(self, client: int, upload: Message) -> None:
        tau = float(upload["tau"])
        # A kept eigenvalue is no smaller than the mean of the dropped ones, but for rounding on the wire.
        weights = (upload["sigma"].square() - tau).clamp_min(0).sqrt()
        factors = [upload["V"] * weights]
        if self.method.centre:
            held = upload["n"] > 0
            factors.append(upload["S"][:, held] / upload["n"][held].to(upload["S"]).sqrt())
        self.estimate.add_factor(torch.cat(factors, dim=1))
        self.delta += tau
        self.count(upload)
        self.samples += int(upload["n"].sum()) if self.method.centre else 0
        self.add_class_sums(upload["S"])

    def offset(self) -> float:
        return self.delta

    def statistics(self) -> dict[str, torch.Tensor]:
        return {**super().statistics(), "delta": torch.tensor(self.delta, dtype=torch.float64)}

    def load_statistics(self, state: dict[str, torch.Tensor]) -> None:
        super().load_statistics(state)
        self.delta = float(state["delta"])


@dataclass
class CentredSketch(ClosedFormMethod):
    """Knobs of the centred sketch.

    Args:
        M: number of random features; None: the backbone's features themselves, H = Z.
        rank: r, directions in each upload; 0: class sums, counts and one number only.
        ridge: lambda; "auto", "gcv": chosen by the statistics.
        centre: sketch the deviations from the client's class means; false: the features themselves.
        scale_scores: divide each class's scores by the root of their sum over the class's own samples.
        bounds: compare with the exact solution after each task (bounds.csv); for small M.
    """

    name: ClassVar[str] = "centred_sketch"
    client_half = CentredSketchClient
    server_half = CentredSketchServer

    rank: int = knob(16, least=0)
    ridge: float | str = ridge_knob(1e-3, above=0)
    centre: bool = True
    bounds: bool = False

    @property
    def penalty(self) -> float | str:
        return self.ridge

    def check(self, problem: Problem, classes_per_task: list[int]) -> None:
        super().check(problem, classes_per_task)
        M = self.dimension(problem)
        if self.rank > M:
            raise UserError(f"method.rank={self.rank} is more than the {M} features", f"0 to {M}")
