"""Three orders in which summaries that arrive one by one can be merged into one of rank r."""

from __future__ import annotations

from abc import ABC, abstractmethod

from fcl_bench.linalg.spectral import Spectrum, merge


class Merger(ABC):
    """Takes summaries as they arrive; `result` is their merge, or None if there were none."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @abstractmethod
    def add(self, summary: Spectrum) -> None:
        """Take in one summary."""

    @abstractmethod
    def result(self) -> Spectrum | None:
        """The merged summary, of rank at most r."""


class SequentialMerger(Merger):
    """Pairwise, in order of arrival (the paper): truncates at each arrival, holds one summary."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._held: list[Spectrum] = []

    def add(self, summary: Spectrum) -> None:
        self._held = [merge([*self._held, summary], self.rank)[0]]

    def result(self) -> Spectrum | None:
        return self._held[0] if self._held else None


class JointMerger(Merger):
    """All in one SVD: the best rank-r approximation of their sum (Eckart-Young). Holds all summaries of the task."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._held: list[Spectrum] = []

    def add(self, summary: Spectrum) -> None:
        self._held.append(summary)

    def result(self) -> Spectrum | None:
        return merge(self._held, self.rank)[0] if self._held else None


class TreeMerger(Merger):
    """Pairwise in a balanced tree: a summary is truncated log2(K) times. Holds log2(K) summaries."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._subtrees: list[tuple[int, Spectrum]] = []

    def add(self, summary: Spectrum) -> None:
        # A binary counter: two subtrees of one height become one of the next.
        height = 0
        while self._subtrees and self._subtrees[-1][0] == height:
            summary = merge([self._subtrees.pop()[1], summary], self.rank)[0]
            height += 1
        self._subtrees.append((height, summary))

    def result(self) -> Spectrum | None:
        merged: Spectrum | None = None
        for _, subtree in reversed(self._subtrees):
            merged = subtree if merged is None else merge([subtree, merged], self.rank)[0]
        return merged


#: `method.merge`
MERGERS: dict[str, type[Merger]] = {"sequential": SequentialMerger, "joint": JointMerger, "tree": TreeMerger}
