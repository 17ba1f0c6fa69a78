"""Merges summaries that arrive one by one into one of rank r."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch

from fcl_bench.linalg.gram import product
from fcl_bench.linalg.spectral import Spectrum, summarise, truncated, upper_gram
from fcl_bench.protocol.message import Message

#: The field that a node of a tree adds to a summary that it merged.
MERGES = "merges"


def merges_objection(upload: Message) -> str:
    """Why an upload with or without `MERGES` is not what it is said to be; "": it is."""
    if (MERGES in upload) == (upload.clients > 1):
        return ""
    return f"{MERGES} is what a node of a tree adds, and the upload is of {upload.clients} clients"


class Part(NamedTuple):
    """A summary, and how often it was truncated on the way.

    Attributes:
        truncations: the most truncating merges that any one of its uploads went through (L_t of FedRAN's Corollary 2 if
            it is made of all uploads).
        merged: whether a merge on this machine made it, so that no wire has rounded it.
    """

    summary: Spectrum
    truncations: int = 0
    merged: bool = False


@dataclass
class Losses:
    """The losses of all merges together.

    Attributes:
        first: sum over merges of the first eigenvalue that each one dropped (FedRAN Eq. 24's second sum).
        share: the largest share of its input's trace that a merge dropped (eta_merge, Eq. 61).
    """

    state: ClassVar[Sequence[str]] = ("first", "share")

    first: float = 0.0
    share: float = 0.0

    def include(self, first: float, share: float) -> None:
        """Add the losses of earlier merges of these parts elsewhere."""
        self.first += first
        self.share = max(self.share, share)

    def merged(self, parts: Sequence[Part], rank: int) -> Part:
        """`merge` of the parts' summaries; its losses are recorded."""
        summaries = [part.summary for part in parts]
        summary, first = merge(summaries, rank, [part.merged for part in parts])
        truncations = max(part.truncations for part in parts)
        self.first += first
        largest = float(summary.sigma[0]) ** 2 if len(summary.sigma) else 0.0
        if first > len(summary.V) * torch.finfo(torch.float64).eps * largest:  # otherwise the drop is rounding
            before = sum(_trace(part) for part in summaries)
            self.share = max(self.share, (before - _trace(summary)) / before)
            truncations += 1
        # A single part is unchanged.
        made = all(summary is not own for own in summaries)
        return Part(summary, truncations, made or any(part.merged for part in parts if part.summary is summary))


def _trace(summary: Spectrum) -> float:
    return float(summary.sigma.square().sum())


def merge(summaries: Sequence[Spectrum], rank: int, exact: Sequence[bool] = ()) -> tuple[Spectrum, float]:
    """Merge sketches into the best rank-r sketch of their sum (FedRAN Eq. 16-19), without forming it.

    With A = [V_1 diag(s_1), V_2 diag(s_2), ...], the sum is AA': V and sigma are A's leading left singular vectors and
    singular values. The paper computes them by a QR of A and an SVD of R; here they come from the smaller Gram matrix
    of A, as in `summarise`, at about half the cost. No matrix is larger than A (M, sum of the ranks); an empty sketch
    leaves the other unchanged.

    Args:
        exact: which of the sketches `summarise` or `merge` left in float64: their own blocks of A'A are diag(s^2) to
            its rounding and are not computed. Empty: none. A sketch that came over a rounding wire is not exact.

    Returns:
        the merged sketch, and the first dropped eigenvalue of AA' (0 where nothing is dropped).
    """
    exact = exact or [False] * len(summaries)
    known = [own for own, is_exact in zip(summaries, exact, strict=True) if len(own.sigma) and is_exact]
    others = [own for own, is_exact in zip(summaries, exact, strict=True) if len(own.sigma) and not is_exact]
    held = known + others or list(summaries[:1])
    if len(held) == 1 and len(held[0].sigma) <= rank:
        return held[0], 0.0
    ranks = [len(sigma) for _, sigma in held]
    rows = held[0].V.new_empty(sum(ranks), len(held[0].V))
    for (V, sigma), own in zip(held, rows.split(ranks), strict=True):
        torch.mul(V.T, sigma.unsqueeze(1), out=own)
    if not known or len(rows) >= rows.shape[1] or rows.dtype != torch.float64:
        return summarise(rows, rank)
    return truncated(rows, rank, partial(_gram_beside, rows, [sigma for _, sigma in known]))


def _gram_beside(rows: torch.Tensor, known: Sequence[torch.Tensor]) -> torch.Tensor:
    """The upper triangle of RR' (n, n) for R (n, M) whose first rows are orthogonal in groups, of these lengths."""
    G = rows.new_zeros(len(rows), len(rows))
    begin = 0
    for lengths in known:
        end = begin + len(lengths)
        G[begin:end, begin:end].diagonal().copy_(lengths.square())
        if end < len(rows):
            G[begin:end, end:] = product(rows[begin:end], rows[end:].T)
        begin = end
    if begin < len(rows):
        G[begin:, begin:] = upper_gram(rows[begin:].T)
    return G


class Merger:
    """Merges summaries as they arrive: pairwise in order of arrival (the paper), or all in one SVD.

    Pairwise, it truncates at each arrival. Merges that would drop nothing wait for the next one, since the sum stays
    the same; so it holds at most r directions and those that have just arrived. One SVD is the best rank-r
    approximation of the sum (Eckart-Young), and holds all summaries until then.

    Args:
        rank: r.
        joint: all in one SVD.
        losses: where the losses of these merges are added; None: its own.
    """

    def __init__(self, rank: int, joint: bool = False, losses: Losses | None = None) -> None:
        self.losses = Losses() if losses is None else losses
        self._rank, self._joint = rank, joint
        self._held: list[Part] = []

    def add(self, summary: Spectrum, truncations: int = 0) -> None:
        """Add one summary, which has gone through this many truncations in other merges."""
        self._held.append(Part(summary, truncations))
        if not self._joint and self._directions() > self._rank:
            self._held = [self.losses.merged(self._held, self._rank)]

    def _directions(self) -> int:
        return sum(len(part.summary.sigma) for part in self._held)

    def result(self) -> Part:
        """The merged summary, of rank at most r. Call it once, after the last summary."""
        return self.losses.merged(self._held, self._rank)

    def parts(self) -> list[Part]:
        """`result` for a merge that follows at once: the summaries themselves if merging them would drop nothing.

        The next merge has the same sum before it, and one factorisation is saved. Call it once, in place of `result`.
        """
        return self._held if self._directions() <= self._rank else [self.result()]
