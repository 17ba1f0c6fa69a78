"""Bounds on what a sketched Gram matrix costs, beside the truth (FedRAN Theorems 1 and 2, Corollary 1).

The truth needs the exact Gram matrix, which no server of a sketching method has; these audits stand outside the
federation and see everything. They are meant for small M, and they double a run's work.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from typing import cast

import torch

from fcl_bench.linalg.gram import class_sums
from fcl_bench.linalg.remainder import Sketch, substitute
from fcl_bench.linalg.solve import solve_symmetric
from fcl_bench.linalg.spectral import Spectrum, summarise
from fcl_bench.methods.closed_form.base import positions, shared_features
from fcl_bench.methods.closed_form.centred_sketch import (
    CentredSketch,
    CentredSketchServer,
    GaussianRemainderServer,
    deviations,
    noise_level,
)
from fcl_bench.methods.closed_form.fedran import FedRAN, FedRANServer
from fcl_bench.protocol.audit import Audit, Everything
from fcl_bench.protocol.method import Server
from fcl_bench.protocol.problem import Problem, Shard
from fcl_bench.protocol.task import Task
from fcl_bench.tracking.console import Notices

log = logging.getLogger(__name__)


class GramAudit(Audit):
    """Keeps the exact G (M, M) and compares a server's estimate and classifier with it.

    Attributes:
        local_error: sum over all uploads so far of the spectral norm of what each one lost.
    """

    def __init__(self, method: FedRAN | CentredSketch, problem: Problem) -> None:
        M = method.dimension(problem)
        self._method, self._problem = method, problem
        self._features = shared_features(method, problem)
        self._G = torch.zeros(M, M, dtype=torch.float64, device=problem.device)
        self._notices = Notices(log)
        self.local_error = 0.0
        self.rows = []

    def observe(self, task: Task, shard: Shard) -> None:
        H = self._features.map(shard.inputs)
        wide = H.to(torch.float64)
        self._G.addmm_(wide.T, wide)
        self.local_error += self.upload_error(H, shard, task)

    @abstractmethod
    def upload_error(self, H: torch.Tensor, shard: Shard, task: Task) -> float:
        """Spectral norm of H'H minus its sketch, or a bound on it."""

    @abstractmethod
    def bounds(self, server: Server) -> tuple[float, float]:
        """Bounds on the spectral norm of G minus its estimate, and on the Frobenius norm of W* - W."""

    def report(self, task: Task, server: Server, everything: Everything) -> None:
        """A row of bounds.csv: bound and truth after a task, null for what is not finite.

        The bounds hold in exact arithmetic; what `wire.dtype` rounds off comes on top.

        `gram_error` <= `gram_bound` (Theorem 1, spectral norm), `weight_error` <= `weight_bound` (Theorem 2, Frobenius
        norm, against W* = (G + lambda I)^-1 B), and for every test sample ||s* - s|| / ||h|| <= `weight_bound`
        (Corollary 1), of which `score_error` is the largest. `certified` is the share of test samples (percent) whose
        margin makes the corollary promise the same class, `agree` the share that really get it.
        """
        assert isinstance(server, FedRANServer | CentredSketchServer)
        gram_bound, weight_bound = self.bounds(server)
        error = self._G - server.gram()
        exact, _, trouble = solve_symmetric(self._G, server.B, shift=server.ridge)
        if trouble:
            self._notices.tell("exact", f"method.bounds, the exact solution itself: {trouble}")
        samples = certified = agree = 0
        score_error = 0.0
        for inputs in everything.tests():
            H = self._features.map(inputs)
            truth, scores = H @ exact, H @ server.W
            length = H.norm(dim=1)
            positive = length > 0
            relative = (truth - scores).norm(dim=1)[positive] / length[positive]
            score_error = max(score_error, float(relative.max()) if len(relative) else 0.0)
            top = truth.topk(min(2, truth.shape[1]), dim=1).values
            margin = top[:, 0] - top[:, 1] if truth.shape[1] > 1 else torch.full_like(length, torch.inf)
            certified += int((margin > 2 * length * weight_bound).sum())
            agree += int((truth.argmax(dim=1) == scores.argmax(dim=1)).sum())
            samples += len(H)
        found = {
            "gram_error": float(torch.linalg.matrix_norm(error, 2)),
            "gram_bound": gram_bound,
            "gram_norm": float(torch.linalg.matrix_norm(self._G, 2)),
            "weight_error": float(torch.linalg.matrix_norm(exact - server.W)),
            "weight_bound": weight_bound,
            "weight_norm": float(torch.linalg.matrix_norm(exact)),
            "score_error": score_error,
            "certified": 100 * certified / max(samples, 1),
            "agree": 100 * agree / max(samples, 1),
        }
        # JSON has no infinity: a bound beyond all numbers is none.
        self.rows.append({name: value if math.isfinite(value) else None for name, value in found.items()})

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"G": self._G, "local_error": torch.tensor(self.local_error, dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._G = state["G"].to(self._G)
        self.local_error = float(state["local_error"])


class FedRANAudit(GramAudit):
    """Theorem 1: the first dropped sigma^2 of every summary and the first dropped eigenvalue of every merge."""

    _method: FedRAN

    def upload_error(self, H: torch.Tensor, shard: Shard, task: Task) -> float:
        return summarise(H, self._method.feasible_rank(self._problem, len(task.columns)))[1]

    def bounds(self, server: Server) -> tuple[float, float]:
        """Eq. 24 and 31; with the floor f, max(eps_G, f) / (lambda (lambda + f)) ||B||."""
        server = cast(FedRANServer, server)
        (V, _), B, ridge = server.sketch, server.B, server.ridge
        gram = self.local_error + server.merge_error
        size = float(torch.linalg.matrix_norm(B))
        if self._method.complement == "floor":
            # G - G~ is positive semidefinite with norm eps_G, and no more than f is taken from it in any direction;
            # the inverses of G + lambda I and of the floored sketch have norms at most 1 / lambda and 1 / (lambda + f).
            floor = server.floor
            return gram, max(gram, floor) / ridge / (ridge + floor) * size
        outside = float(torch.linalg.matrix_norm(B - V @ (V.T @ B)))
        return gram, gram / ridge * (size / ridge) + outside / ridge


class CentredSketchAudit(GramAudit):
    """The analogue for the centred sketch: every upload errs by at most max(sigma_{r+1}^2 - tau, tau)."""

    _method: CentredSketch

    def upload_error(self, H: torch.Tensor, shard: Shard, task: Task) -> float:
        A, (_, sigma), residual = self.sketched(H, shard, task)
        tau = noise_level(A, sigma)
        return max(residual - tau, tau)

    def sketched(self, H: torch.Tensor, shard: Shard, task: Task) -> tuple[torch.Tensor, Spectrum, float]:
        """What the client sketches, its sketch, and sigma_{r+1}^2."""
        which = positions(shard, torch.tensor(task.columns))
        A = deviations(H, which, class_sums(H, which, len(task.columns))) if self._method.centre else H
        return A, *summarise(A, self._method.rank)

    def bounds(self, server: Server) -> tuple[float, float]:
        """The estimate is at least delta I, so its inverse factor is at most 1 / (lambda + delta)."""
        server = cast(CentredSketchServer, server)
        size = float(torch.linalg.matrix_norm(server.B))
        return self.local_error, self.local_error / server.ridge / (server.ridge + server.delta) * size


class GaussianRemainderAudit(CentredSketchAudit):
    """Every upload errs by at most max(sigma_{r+1}^2 - level, lambda_max), of what the server put in its rest's place.

    The rest D and its substitute R are both positive semidefinite and live outside V; R is at least `level` there, and
    at most lambda_max, which is known when the task's Q is. So D - R is between the two.
    """

    def __init__(self, method: CentredSketch, problem: Problem) -> None:
        super().__init__(method, problem)
        self._uploads: list[tuple[Sketch, float]] = []

    def upload_error(self, H: torch.Tensor, shard: Shard, task: Task) -> float:
        A, (V, sigma), residual = self.sketched(H, shard, task)
        dropped = float(A.square().sum() - sigma.square().sum())
        self._uploads.append((Sketch(V, sigma, max(dropped, 0.0)), residual))
        return 0.0

    def bounds(self, server: Server) -> tuple[float, float]:
        for sketch, residual in self._uploads:
            largest, level = substitute(sketch, cast(GaussianRemainderServer, server).Q, self._method.mix)
            self.local_error += max(residual - level, largest)
        self._uploads = []
        return super().bounds(server)
