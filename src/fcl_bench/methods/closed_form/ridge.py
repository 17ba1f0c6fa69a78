"""Closed-form methods whose solve has a ridge: the ridge, which the statistics may choose, and the Gram matrix."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from fcl_bench.config import knob
from fcl_bench.linalg.gram import add_gram, gram
from fcl_bench.linalg.solve import Solution, relative_rounding, solve_symmetric
from fcl_bench.methods.closed_form.algebra.ridge import (
    AUTO,
    GCV,
    Spectrum,
    gcv,
    mean_share,
    score_scales,
    unit_lengths,
)
from fcl_bench.methods.closed_form.base import ClosedFormClient, ClosedFormMethod, ClosedFormServer
from fcl_bench.protocol.context import ClientData, Context
from fcl_bench.protocol.message import Message

_MIB = 2**20


def ridge_knob(default: float | str | None, **limits: Any) -> Any:
    """A knob `float | str`: a ridge within the limits, "auto" (1 % of the mean eigenvalue of G) or "gcv"."""
    return knob(default, choices=(AUTO, GCV), **limits)


@dataclass
class RidgeMethod(ClosedFormMethod):
    """A `ClosedFormMethod` that solves a ridge regression.

    Attributes:
        penalty_knob: the name of the knob that has the ridge.
        in_tables: whether papers' tables count the bytes of its uploads.
        counts_samples: whether uploads themselves say of how many samples they are, so that `Message.samples` need not.
    """

    penalty_knob: ClassVar[str] = "ridge"
    in_tables: ClassVar[bool] = False
    counts_samples: ClassVar[bool] = False
    search: ClassVar[Mapping[str, str]] = {"scale_scores": "false,true"}

    scale_scores: bool | str = knob(False, choices=("length",))

    @classmethod
    def search_space(cls) -> dict[str, str]:
        return {cls.penalty_knob: "log(1e-4,1e7)", **super().search_space()}

    @property
    def penalty(self) -> float | str:
        """The ridge of the server's solve as its knob says: a number, "auto" or "gcv"."""
        penalty: float | str = getattr(self, self.penalty_knob)
        return penalty

    def paper_values(self, context: Context, classes: int) -> int:
        """How many values papers' tables count in an upload: a Gram matrix and sums of so many classes."""
        M = self.dimension(context)
        return M * M + M * classes

    def fedran_values(self, context: Context, classes_per_task: Sequence[int]) -> int:
        """How many values FedRAN's table counts for one task, with columns for all classes of the stream."""
        return self.paper_values(context, context.all_classes(classes_per_task))

    def paper_bytes(self, context: Context, classes_per_task: Sequence[int]) -> dict[str, float]:
        if not self.in_tables:
            return {}
        fedran = self.fedran_values(context, classes_per_task)
        stsa = sum(self.paper_values(context, classes) for classes in classes_per_task)
        return {"fedran_mib": 8 * fedran / _MIB, "stsa_mib": 4 * stsa / _MIB}


class RidgeClient(ClosedFormClient):
    """A client of a `RidgeMethod`."""

    method: RidgeMethod

    def reported_samples(self, client_data: ClientData) -> int | None:
        """`Message.samples`: the number of samples if the server needs it for its ridge, else None: it is not sent."""
        needed = self.method.penalty == GCV and not self.method.counts_samples
        return len(client_data.labels) if needed else None


class Estimate:
    """G (M, M), a sum of matrices or of products F F', and the solution of (G + shift I) W = B.

    Args:
        low_rank: keep the factors side by side, F (M, m) with G = F F', until m would reach M; from then on, or from
            the beginning, G itself.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, low_rank: bool = False) -> None:
        self._blocks = [torch.zeros(size, 0, dtype=dtype, device=device)]
        self._matrix = None if low_rank else torch.zeros(size, size, dtype=dtype, device=device)

    @property
    def size(self) -> int:
        """M."""
        return self._blocks[0].shape[0]

    @property
    def matrix(self) -> torch.Tensor:
        """G (M, M): the stored matrix, which callers may add to in place, or the product of the stored factors."""
        return gram(self._factor().T) if self._matrix is None else self._matrix

    def add(self, G: torch.Tensor) -> None:
        """G += another one (M, M), where the matrix itself is stored."""
        total = self.matrix
        if total.device.type == "cpu" and (G.dtype, total.dtype) == (torch.float32, torch.float64):
            # NumPy converts in pieces that stay in the cache, where torch makes a copy of the whole.
            np.add(total.numpy(), G.numpy(), out=total.numpy())
        else:
            total.add_(G)

    def add_factor(self, F: torch.Tensor) -> None:
        """G += F F' for F (M, m)."""
        if self._matrix is not None:
            add_gram(self._matrix, F.T)
            return
        self._blocks.append(F)
        if sum(block.shape[1] for block in self._blocks) >= self.size:
            self._matrix = self.matrix
            self._blocks = [F.new_zeros(self.size, 0)]

    def _factor(self) -> torch.Tensor:
        self._blocks = [torch.cat(self._blocks, dim=1)]
        return self._blocks[0]

    def trace(self) -> float:
        """tr(G)."""
        return float(self._factor().square().sum() if self._matrix is None else self._matrix.trace())

    def spectrum(self, B: torch.Tensor) -> Spectrum:
        """The spectrum of G in float64, with B (M, C); the complement of the factors' span is one entry at the end."""
        if self._matrix is not None:
            values, V = torch.linalg.eigh(self._matrix.double())
            return Spectrum(values.clamp_min(0), (V.T @ B.double()).square().sum(dim=1), torch.ones_like(values))
        Q, R = torch.linalg.qr(self._factor().double())
        values, V = torch.linalg.eigh(R @ R.T)
        within = Q.T @ B.double()
        found = Spectrum(values.clamp_min(0), (V.T @ within).square().sum(dim=1), torch.ones_like(values))
        # |B|^2 less the energies is rounding where B is in the span, and a small ridge makes that rounding large.
        outside = (B.double() - Q @ within).square().sum()
        return found.with_rest(0.0, float(outside), self.size - len(values))

    def solve(self, B: torch.Tensor, shift: float, rounding: float) -> Solution:
        """W = (G + shift I)^-1 B, in the span of F and B where that is much smaller than M.

        With Q an orthonormal basis of the span, W = Q (Q'F F'Q + shift I)^-1 Q'B. (The Woodbury identity is the same in
        exact arithmetic, but it subtracts what it then divides by `shift`: its error grows with the square of the
        condition number.)

        Args:
            B: (M, C).
            shift: a ridge, or (below zero) the sum of the regularisers to be removed from G.
            rounding: relative error of G's entries; see `linalg.solve.relative_rounding`.
        """
        if self._matrix is None and 2 * (self._factor().shape[1] + B.shape[1]) <= self.size:
            F = self._factor()
            Q, R = torch.linalg.qr(torch.cat([F, B], dim=1))
            E = R[:, : F.shape[1]]
            inner = solve_symmetric(gram(E.T), R[:, F.shape[1] :], rounding, shift)
            return Solution(Q @ inner.W, inner.condition, inner.trouble)
        return solve_symmetric(self.matrix, B, rounding, shift)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`G` (M, M), or `factor` (M, m)."""
        return {"factor": self._factor()} if self._matrix is None else {"G": self._matrix}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        like = self._blocks[0]
        self._matrix = state["G"].to(like) if "G" in state else None
        self._blocks = [state["factor"].to(like) if "factor" in state else like[:, :0]]


class RegularisedServer(ClosedFormServer):
    """A `ClosedFormServer` whose solve has a ridge: a number, or chosen by the statistics.

    Attributes:
        samples: N of all uploads so far, where the method's clients tell it.
        ridge: the ridge of the last solve.
        scales: (C,) what the scores are multiplied by; None: nothing.
    """

    method: RidgeMethod
    state: ClassVar[Sequence[str]] = ("samples",)

    def __init__(self, method: RidgeMethod, context: Context) -> None:
        super().__init__(method, context)
        self.samples = 0
        self.ridge = 0.0
        self.scales: torch.Tensor | None = None

    def objection(self, upload: Message) -> str:
        required = self.method.penalty == GCV and upload.stage == "statistics" and not self.method.counts_samples
        missing = required and upload.samples is None
        return "it does not say how many samples it is of, and the ridge is to be chosen by gcv" if missing else ""

    def solve(self) -> None:
        self.ridge = self.choose_ridge()
        super().solve()
        if self.method.scale_scores == "length":
            self.scales = unit_lengths(self.W)
        elif self.method.scale_scores:
            self.scales = score_scales((self.B * self.W).sum(dim=0))

    def classifier(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """W and the bias, both scaled if the method scales scores."""
        if self.scales is None:
            return self.W, self.bias
        return self.W * self.scales, None if self.bias is None else self.bias * self.scales

    def report(self) -> dict[str, Any]:
        """With a ridge chosen by the statistics, `ridge` too."""
        chosen = {"ridge": self.ridge} if isinstance(self.method.penalty, str) else {}
        return {**super().report(), **chosen}

    def choose_ridge(self) -> float:
        """The ridge of the next solve: the knob's number, or chosen by the statistics so far."""
        penalty = self.method.penalty
        if not isinstance(penalty, str):
            return float(penalty)
        if penalty == GCV:
            found = gcv(self.spectrum(), self.samples, self.candidates(), self.squares())
            if found is not None:
                return found
            self.notices.tell(GCV, f"{self.method.name}: no ridge fits the statistics by gcv, so it is as with {AUTO}")
        return mean_share(self.trace(), self.dimension)

    def candidates(self) -> torch.Tensor | None:
        """(k,) the ridges that `gcv` chooses from, ascending; None: those around the mean eigenvalue."""
        return None

    def squares(self) -> float:
        """The sum of the squared labels so far, each weighted as in G and B."""
        return self.samples

    @abstractmethod
    def trace(self) -> float:
        """The trace of the estimate of the Gram matrix."""

    @abstractmethod
    def spectrum(self) -> Spectrum:
        """The eigenvalues of the estimate of the Gram matrix, with B."""


class RidgeServer(RegularisedServer):
    """A `RegularisedServer` that keeps an estimate of the Gram matrix and solves (G + (offset + ridge) I) W = B.

    Attributes:
        estimate: G (M, M), a sum over all uploads so far.
        uploads: the number of uploads so far.
        sums_what_came: whether G is a sum of matrices that clients sent; false: the server makes G itself.
    """

    state: ClassVar[Sequence[str]] = ("estimate", "uploads")
    sums_what_came: ClassVar[bool] = True

    def __init__(self, method: RidgeMethod, context: Context, low_rank: bool = False) -> None:
        super().__init__(method, context)
        self.estimate = Estimate(self.dimension, context.dtype, context.device, low_rank)
        self.uploads = 0

    def count(self, upload: Message) -> None:
        """Count one more upload, or the uploads that it is made of."""
        self.uploads += upload.clients
        self.samples += upload.samples or 0

    def offset(self) -> float:
        """What is added to the eigenvalues of G to get those of the estimate; below zero, it is taken out."""
        return 0.0

    def trace(self) -> float:
        return self.estimate.trace() + self.dimension * self.offset()

    def spectrum(self) -> Spectrum:
        return self.estimate.spectrum(self.B).shifted(self.offset())

    def rounding(self) -> float:
        """Relative error of G's entries; it includes the wire's rounding if clients sent them."""
        return relative_rounding(self.context.dtype, *([self.context.wire.dtype] if self.sums_what_came else []))

    def solution(self) -> Solution:
        if self.context.release is None:
            return self.estimate.solve(self.B, self.offset() + self.ridge, self.rounding())
        S = self.estimate.matrix.clone()
        S.diagonal().add_(self.offset())
        return solve_symmetric(self.denoised(S, self.uploads), self.B, self.rounding(), self.ridge)
