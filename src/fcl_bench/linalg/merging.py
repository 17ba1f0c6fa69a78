"""Three orders in which summaries that arrive one by one can be merged into one of rank r."""

from __future__ import annotations

from abc import ABC, abstractmethod

from fcl_bench.linalg.spectral import Spectrum, merge


class Merger(ABC):
    """Takes summaries as they arrive; `result` is their merge, or None if there were none.

    Attributes:
        rank: r.
        dropped: sum over the merges so far of the first eigenvalue each one dropped (their part of FedRAN's Eq. 24).
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.dropped = 0.0
        self._held: list[Spectrum] = []

    def _merge(self, *summaries: Spectrum) -> Spectrum:
        merged, dropped = merge(summaries, self.rank)
        self.dropped += dropped
        return merged

    @abstractmethod
    def add(self, summary: Spectrum) -> None:
        """Take in one summary."""

    def result(self) -> Spectrum | None:
        """The merged summary, of rank at most r; to be called once, when all are in."""
        while len(self._held) > 1:
            self._held[-2:] = [self._merge(*self._held[-2:])]
        return self._held[0] if self._held else None


class SequentialMerger(Merger):
    """Pairwise, in order of arrival (the paper): truncates at each arrival, holds one summary."""

    def add(self, summary: Spectrum) -> None:
        self._held = [self._merge(*self._held, summary)]


class JointMerger(Merger):
    """All in one SVD: the best rank-r approximation of their sum (Eckart-Young). Holds all summaries of the task."""

    def add(self, summary: Spectrum) -> None:
        self._held.append(summary)

    def result(self) -> Spectrum | None:
        return self._merge(*self._held) if self._held else None


class TreeMerger(Merger):
    """Pairwise in a balanced tree: a summary is truncated log2(K) times. Holds log2(K) summaries."""

    _arrived = 0

    def add(self, summary: Spectrum) -> None:
        # A binary counter: two subtrees of one height become one of the next.
        trees = self._arrived = self._arrived + 1
        while trees % 2 == 0:
            summary = self._merge(self._held.pop(), summary)
            trees //= 2
        self._held.append(summary)


#: `method.merge`
MERGERS: dict[str, type[Merger]] = {"sequential": SequentialMerger, "joint": JointMerger, "tree": TreeMerger}
