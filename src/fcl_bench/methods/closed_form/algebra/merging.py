"""Three orders in which summaries that arrive one by one can be merged into one of rank r."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fcl_bench.linalg.spectral import Spectrum, merge


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


@dataclass
class Merger(ABC):
    """Takes summaries as they arrive; `result` is their merge, or None if there were none.

    Attributes:
        rank: r.
        losses: where the losses of these merges are added.
    """

    rank: int
    losses: Losses = field(default_factory=Losses)

    def __post_init__(self) -> None:
        self._held: list[Part] = []

    @abstractmethod
    def add(self, summary: Spectrum, truncations: int = 0) -> None:
        """Add one summary, which has gone through this many truncations in other merges."""

    def result(self) -> Part | None:
        """The merged summary, of rank at most r. Call it once, after the last summary."""
        return self.losses.merged(self._held, self.rank) if self._held else None

    def parts(self) -> list[Part]:
        """`result` for a merge that follows at once: the summaries themselves if merging them would drop nothing.

        The next merge has the same sum before it, and one factorisation is saved. Call it once, in place of `result`.
        """
        if sum(len(part.summary.sigma) for part in self._held) <= self.rank:
            return self._held
        merged = self.result()
        return [] if merged is None else [merged]


class SequentialMerger(Merger):
    """Pairwise, in order of arrival (the paper): truncates at each arrival.

    Merges that would drop nothing wait for the next one, since the sum stays the same. So the merger holds at most r
    directions and those that have just arrived.
    """

    def add(self, summary: Spectrum, truncations: int = 0) -> None:
        self._held.append(Part(summary, truncations))
        if sum(len(part.summary.sigma) for part in self._held) > self.rank:
            self._held = [self.losses.merged(self._held, self.rank)]


class JointMerger(Merger):
    """One SVD of all summaries: the best rank-r approximation of their sum (Eckart-Young). Holds all of the task's."""

    def add(self, summary: Spectrum, truncations: int = 0) -> None:
        self._held.append(Part(summary, truncations))


class TreeMerger(Merger):
    """Pairwise in a balanced tree: a summary is truncated log2(K) times. Holds log2(K) summaries."""

    _arrived = 0

    def add(self, summary: Spectrum, truncations: int = 0) -> None:
        # A binary counter: two subtrees of one height become one of the next.
        part = Part(summary, truncations)
        trees = self._arrived = self._arrived + 1
        while trees % 2 == 0:
            part = self.losses.merged([self._held.pop(), part], self.rank)
            trees //= 2
        self._held.append(part)

    def result(self) -> Part | None:
        while len(self._held) > 1:
            self._held[-2:] = [self.losses.merged(self._held[-2:], self.rank)]
        return self._held[0] if self._held else None


#: `method.merge`
MERGERS: dict[str, type[Merger]] = {"sequential": SequentialMerger, "joint": JointMerger, "tree": TreeMerger}
