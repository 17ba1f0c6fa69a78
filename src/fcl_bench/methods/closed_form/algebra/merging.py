"""Merges summaries that arrive one by one into one of rank r."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fcl_bench.linalg.spectral import Spectrum, merge
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

    first: float = 0.0
    share: float = 0.0

    def include(self, first: float, share: float) -> None:
        """Add the losses of earlier merges of these parts elsewhere."""
        self.first += first
        self.share = max(self.share, share)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Both numbers."""
        return {"losses": torch.tensor([self.first, self.share], dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned."""
        self.first, self.share = state["losses"].tolist()

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
