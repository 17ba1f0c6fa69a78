"""Servers of closed-form methods whose solve has a ridge, with or without an estimate of the Gram matrix."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from fcl_bench.linalg.solve import Solution, relative_rounding, solve_symmetric
from fcl_bench.methods.closed_form.algebra.estimate import Estimate
from fcl_bench.methods.closed_form.algebra.ridge import GCV, Spectrum, gcv, mean_share
from fcl_bench.methods.closed_form.base import AUTO, ClosedFormMethod, ClosedFormServer
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.message import Message


class RegularisedServer(ClosedFormServer):
    """A `ClosedFormServer` whose solve has a ridge: a number, or chosen by the statistics."""

    def objection(self, upload: Message) -> str:
        missing = self.method.penalty == GCV and upload.samples is None and "n" not in upload
        return "it does not say how many samples it is of, and the ridge is to be chosen by gcv" if missing else ""

    def choose_ridge(self) -> float:
        """The ridge of the next solve: the knob's number, or chosen by the statistics so far."""
        penalty = self.method.penalty
        if not isinstance(penalty, str):
            return float(penalty)
        found = None
        if penalty == GCV:
            found = gcv(self.spectrum(), self.samples, self.candidates(), self.squares())
        if penalty == GCV and found is None:
            self.notices.tell(GCV, f"{self.method.name}: no ridge fits the statistics by gcv, so it is as with {AUTO}")
        return mean_share(self.trace(), self.dimension) if found is None else found

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

    sums_what_came: ClassVar[bool] = True

    def __init__(self, method: ClosedFormMethod, context: Context, low_rank: bool = False) -> None:
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

    def statistics(self) -> dict[str, torch.Tensor]:
        return {**self.estimate.state_dict(), "uploads": torch.tensor(self.uploads)}

    def load_statistics(self, state: dict[str, torch.Tensor]) -> None:
        self.estimate.load_state_dict(state)
        self.uploads = int(state["uploads"])
