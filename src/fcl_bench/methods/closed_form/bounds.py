"""Bounds on the errors of a sketched Gram matrix, and the true errors (FedRAN Theorems 1 and 2, Corollaries 1 and 2).

The true errors need the exact Gram matrix, which no server of a sketching method has; these audits are outside the
federation and see all data. They are meant for small M, and they double a run's work.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from fcl_bench.linalg.gram import class_sums
from fcl_bench.linalg.solve import solve_symmetric
from fcl_bench.linalg.spectral import summarise
from fcl_bench.methods.closed_form.algebra.remainder import deviations, noise_level
from fcl_bench.methods.closed_form.base import positions, projection_seed
from fcl_bench.protocol.audit import Audit, FullData
from fcl_bench.protocol.context import ClientData, Context, Task
from fcl_bench.protocol.state import restore, saved
from fcl_bench.tracking.console import Notices

if TYPE_CHECKING:
    from fcl_bench.methods.closed_form.centred_sketch import CentredSketch, CentredSketchServer
    from fcl_bench.methods.closed_form.fedran import FedRAN, FedRANServer

log = logging.getLogger(__name__)


class Bounds(NamedTuple):
    """Upper bounds on the errors of a server's estimate and classifier.

    Attributes:
        gram: bound on G minus its estimate, in the spectral norm.
        weights: bound on W* - W in the Frobenius norm, as in the method's paper.
        sharper: the same bound by `inverse_gap`, never larger.
    """

    gram: float
    weights: float
    sharper: float


def inverse_gap(error: float, ridge: float) -> float:
    """error / (ridge (ridge + error)): the most by which (A + ridge I)^-1 and (B + ridge I)^-1 differ (spectral norm).

    For symmetric positive semidefinite A and B with ||A - B|| <= error. With E = error I, B <= A + E in the order of
    symmetric matrices, so (A + ridge I)^-1 - (B + ridge I)^-1 <= (A + ridge I)^-1 - (A + E + ridge I)^-1, whose
    eigenvalues 1/x - 1/(x + error) are largest at x = ridge; and the same with A and B exchanged. FedRAN's proof has
    error / ridge^2 (Eq. 71).
    """
    return error / (ridge + error) / ridge


class GramAudit(Audit):
    """Keeps the exact G (M, M) and compares a server's estimate and classifier with it.

    Attributes:
        local_error: sum over all uploads so far of the spectral norm of each one's error.
        state: names of the attributes that a resumed run needs.
    """

    state: ClassVar[Sequence[str]] = ("_G", "local_error")

    def __init__(self, method: FedRAN | CentredSketch, context: Context) -> None:
        M = method.dimension(context)
        self._method, self._context = method, context
        self._features = method.features(context, projection_seed(context))
        self._G = torch.zeros(M, M, dtype=torch.float64, device=context.device)
        self._notices = Notices(log)
        self.local_error = 0.0
        self.rows = []

    def observe(self, task: Task, client_data: ClientData) -> None:
        H = self._features.map(client_data.inputs)
        wide = H.to(torch.float64)
        self._G.addmm_(wide.T, wide)
        self.local_error += self.upload_error(H, client_data, task)

    @abstractmethod
    def upload_error(self, H: torch.Tensor, client_data: ClientData, task: Task) -> float:
        """Spectral norm of H'H minus its sketch, or a bound on it."""

    @abstractmethod
    def bounds(self, server: Any) -> Bounds:
        """The theorems' bounds for the server after a task."""

    def in_trace(self, server: Any, error: torch.Tensor) -> dict[str, float]:
        """The columns that a bound on the trace of G minus its estimate (M, M) adds to the row."""
        return {}

    def report(self, task: Task, server: Any, everything: FullData) -> None:
        """One row of bounds.csv, whose columns docs/methods/fedran.md explains; null for values that are not finite.

        The bounds hold in exact arithmetic; the rounding of `wire.dtype` is not included. W* = (G + lambda I)^-1 B, and
        `sharper` is by `inverse_gap`. Samples are certified whose margin makes Corollary 1 promise the same class.
        """
        gram_bound, weight_bound, sharper = self.bounds(server)
        error = self._G - server.gram()
        exact, _, trouble = solve_symmetric(self._G, server.B, shift=server.ridge)
        if trouble:
            self._notices.tell("exact", f"method.bounds, the exact solution itself: {trouble}")
        samples = certified = certified_sharper = agree = 0
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
            certified_sharper += int((margin > 2 * length * sharper).sum())
            agree += int((truth.argmax(dim=1) == scores.argmax(dim=1)).sum())
            samples += len(H)
        found = {
            "gram_error": float(torch.linalg.matrix_norm(error, 2)),
            "gram_bound": gram_bound,
            "gram_norm": float(torch.linalg.matrix_norm(self._G, 2)),
            "weight_error": float(torch.linalg.matrix_norm(exact - server.W)),
            "weight_bound": weight_bound,
            "weight_bound_sharper": sharper,
            "weight_norm": float(torch.linalg.matrix_norm(exact)),
            "score_error": score_error,
            "certified": 100 * certified / max(samples, 1),
            "certified_sharper": 100 * certified_sharper / max(samples, 1),
            "agree": 100 * agree / max(samples, 1),
            **self.in_trace(server, error),
        }
        # JSON has no infinity, so an infinite bound becomes null.
        self.rows.append({name: value if math.isfinite(value) else None for name, value in found.items()})

    def state_dict(self) -> dict[str, torch.Tensor]:
        return saved(self, self.state)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        restore(self, self.state, state, self._context.device)


class FedRANAudit(GramAudit):
    """Theorem 1: the first dropped sigma^2 of every summary and the first dropped eigenvalue of every merge.

    Corollary 2: it uses the largest share that a summary or a merge dropped, and how many merges an upload went
    through.
    """

    _method: FedRAN
    state = (*GramAudit.state, "_energy", "_samples", "_largest", "_share")

    def __init__(self, method: FedRAN, context: Context) -> None:
        super().__init__(method, context)
        #: Over all uploads so far: E_t = ||H||_F^2, N_t samples, the largest ||h||^2, and the largest share dropped.
        self._energy, self._samples, self._largest, self._share = 0.0, 0, 0.0, 0.0

    def upload_error(self, H: torch.Tensor, client_data: ClientData, task: Task) -> float:
        (_, sigma), dropped = summarise(H, self._method.feasible_rank(self._context, len(task.columns)))
        squares = H.double().square().sum(dim=1)
        energy = float(squares.sum())
        if dropped:
            self._share = max(self._share, 1 - float(sigma.double().square().sum()) / energy)
        self._energy += energy
        self._samples += len(H)
        self._largest = max(self._largest, float(squares.max()))
        return dropped

    def in_trace(self, server: FedRANServer, error: torch.Tensor) -> dict[str, float]:
        """Corollary 2: `gram_error` <= `trace_error` <= `tail_bound` (Eq. 63) <= `tail_bound_R` (Eq. 64).

        `eta_local` and `eta_merge` are the smallest numbers with which Eq. 60 and 61 hold, `truncations` is L_t,
        counting merges that dropped something, and `energy` is E_t, the trace of the exact G.
        """
        tail = self._share + server.losses.share * server.truncations
        return {
            "trace_error": float(error.trace()),
            "tail_bound": tail * self._energy,
            "tail_bound_R": tail * self._largest * self._samples,
            "eta_local": self._share,
            "eta_merge": server.losses.share,
            "truncations": float(server.truncations),
            "energy": self._energy,
        }

    def bounds(self, server: FedRANServer) -> Bounds:
        """Eq. 24 and 31; with the floor f, max(eps_G, f) / (lambda (lambda + f)) ||B||.

        Sharper, the first term is eps_G ||B|| / (lambda (lambda + eps_G)).
        """
        (V, _), B, ridge = server.sketch, server.B, server.ridge
        gram = self.local_error + server.losses.first
        size = float(torch.linalg.matrix_norm(B))
        if self._method.complement == "floor":
            # G - G~ is positive semidefinite with norm eps_G, and no more than f is taken from it in any direction;
            # the inverses of G + lambda I and of the floored sketch have norms at most 1 / lambda and 1 / (lambda + f).
            floor = server.floor
            # Floored, the sketch is at most G + f I and at least G - eps_G I, and at least f I.
            sharper = max(inverse_gap(floor, ridge), inverse_gap(gram, ridge + floor))
            return Bounds(gram, max(gram, floor) / ridge / (ridge + floor) * size, sharper * size)
        outside = float(torch.linalg.matrix_norm(B - V @ (V.T @ B))) / ridge
        return Bounds(gram, gram / ridge * (size / ridge) + outside, inverse_gap(gram, ridge) * size + outside)


class CentredSketchAudit(GramAudit):
    """The analogue for the centred sketch: the error of every upload is at most max(sigma_{r+1}^2 - tau, tau)."""

    _method: CentredSketch

    def upload_error(self, H: torch.Tensor, client_data: ClientData, task: Task) -> float:
        which = positions(client_data, torch.tensor(task.columns))
        A = deviations(H, which, class_sums(H, which, len(task.columns)))
        (_, sigma), residual = summarise(A, self._method.rank)
        tau = noise_level(A, sigma)
        return max(residual - tau, tau)

    def bounds(self, server: CentredSketchServer) -> Bounds:
        """The estimate is at least delta I, so its inverse factor is at most 1 / (lambda + delta)."""
        size, ridge = float(torch.linalg.matrix_norm(server.B)), server.ridge
        error = self.local_error + server.merge_error
        weights = error / ridge / (ridge + server.delta)
        return Bounds(error, weights * size, min(weights, inverse_gap(error, ridge)) * size)
