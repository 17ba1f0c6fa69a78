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

from fcl_bench.errors import UserError, require_count, require_positive
from fcl_bench.linalg.class_sums import class_sums
from fcl_bench.linalg.low_rank_sum import LowRankSum
from fcl_bench.linalg.solve import Solution
from fcl_bench.linalg.spectral import Spectrum, summarise
from fcl_bench.methods.closed_form.base import AnalyticClient, AnalyticMethod, AnalyticServer, positions
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Audit, Client, Problem, Server, Shard


@dataclass
class CentredSketch(AnalyticMethod):
    """Knobs of the centred sketch.

    Args:
        M: number of random features; None: the backbone's features themselves, H = Z.
        rank: r, directions in each upload; 0: class sums, counts and one number only.
        ridge: lambda.
        centre: sketch the deviations from the client's class means; false: the features themselves.
        bounds: compare with the exact solution after each task (bounds.csv); for small M.
    """

    name: ClassVar[str] = "centred_sketch"

    rank: int = 16
    ridge: float = 1e-3
    centre: bool = True
    bounds: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("method.rank", self.rank, least=0)
        require_positive("method.ridge", self.ridge)

    def check(self, problem: Problem, classes_per_task: list[int]) -> None:
        super().check(problem, classes_per_task)
        M = self.dimension(problem)
        if self.rank > M:
            raise UserError(f"method.rank={self.rank} is more than the {M} features", f"0 to {M}")

    def client(self, problem: Problem) -> Client:
        return CentredSketchClient(self, problem)

    def server(self, problem: Problem) -> Server:
        return CentredSketchServer(self, problem)

    def audit(self, problem: Problem) -> Audit | None:
        from fcl_bench.audits.bounds import CentredSketchAudit

        return CentredSketchAudit(self, problem) if self.bounds else None


def deviations(H: torch.Tensor, which: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """A (n, M): the rows of H (n, M) minus the mean of their class, for the class sums (M, c) of H by `which` (n,)."""
    means = sums / torch.bincount(which, minlength=sums.shape[1]).clamp_min(1)
    return H - means.T[which]


def noise_level(A: torch.Tensor, sigma: torch.Tensor) -> float:
    """tau, the mean of the eigenvalues of A'A that a sketch with singular values `sigma` drops."""
    others = A.shape[1] - len(sigma)
    dropped = float(A.square().sum() - sigma.square().sum())
    return max(dropped, 0.0) / others if others else 0.0


class CentredSketchClient(AnalyticClient):
    """Class sums, counts, and the sketch of what they don't tell."""

    def __init__(self, method: CentredSketch, problem: Problem) -> None:
        super().__init__(method, problem)
        self._rank, self._centre = method.rank, method.centre

    def update(self, shard: Shard, broadcast: Message) -> Message:
        """V (M, r), sigma (r), tau (1), S (M, c_t) and, if centred, the counts n (c_t)."""
        H = self.features(shard, broadcast)
        columns = broadcast["columns"]
        which = positions(shard, columns)
        sums = class_sums(H, which, len(columns))
        A = deviations(H, which, sums) if self._centre else H
        # At rank 0 there is nothing to decompose, which is the point of it.
        V, sigma = summarise(A, self._rank)[0] if self._rank else Spectrum(H.new_zeros(H.shape[1], 0), H.new_zeros(0))
        tau = torch.tensor([noise_level(A, sigma)], dtype=H.dtype)
        upload = {"V": V, "sigma": sigma, "tau": tau, "S": sums}
        if self._centre:
            upload["n"] = torch.bincount(which, minlength=len(columns)).to(torch.int32)
        return Message(upload, per_class=["S"])


class CentredSketchServer(AnalyticServer):
    """G += V (diag(sigma^2) - tau I) V' + sum_c S_c S_c'/n_c, delta += tau; W = (G + (delta + lambda) I)^-1 B."""

    def __init__(self, method: CentredSketch, problem: Problem) -> None:
        super().__init__(method, problem)
        self._ridge = method.ridge
        self._sum = LowRankSum(self.dimension, problem.dtype, problem.device)
        self._delta = 0.0

    @property
    def delta(self) -> float:
        """The energy per direction that the uploads so far dropped."""
        return self._delta

    def gram(self) -> torch.Tensor:
        """The estimate of the Gram matrix, G + delta I (M, M)."""
        return self._sum.dense() + self._delta * torch.eye(self.dimension).to(self.B)

    def absorb(self, client_id: int, message: Message) -> None:
        tau = float(message["tau"])
        # A kept eigenvalue is no smaller than the mean of the dropped ones, but for rounding on the wire.
        weights = (message["sigma"].square() - tau).clamp_min(0).sqrt()
        factors = [message["V"] * weights]
        if "n" in message:
            held = message["n"] > 0
            factors.append(message["S"][:, held] / message["n"][held].to(message["S"]).sqrt())
        self._sum.add(torch.cat(factors, dim=1))
        self._delta += tau
        self.add_class_sums(message["S"])

    def solution(self) -> Solution:
        return self._sum.solve(self._delta + self._ridge, self.B)

    def statistics(self) -> dict[str, torch.Tensor]:
        return {**self._sum.state_dict(), "delta": torch.tensor(self._delta, dtype=torch.float64)}

    def load_statistics(self, state: dict[str, torch.Tensor]) -> None:
        self._delta = float(state["delta"])
        self._sum.load_state_dict(state)
