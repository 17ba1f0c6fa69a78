"""Time: Si-Blurry streams, whose tasks have no clear border."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.sources.base import Dataset, parts
from fcl_bench.data.splits.base import (
    Division,
    SampleSplit,
    checked_classes,
    class_order,
    columns_of,
    even_sizes,
    require_classes,
)
from fcl_bench.randomness import generator


@dataclass
class SiBlurry(SampleSplit):
    """Stochastic blurry task boundaries (Moon et al. 2023, as AFCL F.1 uses them).

    docs/reference/splits.md has the rule, and what texts and public code do. How much leaves each task is random
    (cuts at uniform places). Test samples are divided by the same rule.
    """

    name: ClassVar[str] = "si_blurry"
    disjoint: float = knob(0.5, least=0, most=1, words="a share, 0 to 1")
    blurry: float = knob(0.1, least=0, most=1, words="a share, 0 to 1")
    sizes: str = knob("random", choices=("random", "equal"))
    reassign: str = knob("others", choices=("others", "any"))

    def divide(self, dataset: Dataset, tasks: int, seed: int) -> Division:
        labels = checked_classes(dataset)
        require_classes(tasks, len(labels))
        order, disjoint = class_order(labels, seed), round(self.disjoint * len(labels))
        rng = generator(seed, "si-blurry sizes")
        home = self._homes(disjoint, len(labels) - disjoint, tasks, rng)
        shares = np.diff(np.sort(rng.random(tasks - 1)), prepend=0, append=1)

        def members(labels: np.ndarray, side: int) -> list[np.ndarray]:
            place = columns_of(labels, order)
            task = np.where(place < 0, -1, home[place])
            blurry = np.flatnonzero(place >= disjoint)
            rng = generator(seed, "si-blurry samples", side)
            if tasks > 1:
                leave = blurry[self._leaving(place[blurry], task[blurry], shares, rng)]
                task[leave] = self._destinations(task[leave], tasks, rng)
            return parts(task, tasks)

        return Division(order, members(dataset.train.labels, 0), members(dataset.test.labels, 1))

    def _homes(self, disjoint: int, blurry: int, tasks: int, rng: np.random.Generator) -> np.ndarray:
        """The home task of each class (C,), the disjoint ones first. No task is without a class."""
        # The remainder goes to the later tasks, and that of the disjoint classes to the earlier ones.
        of_blurry = np.array(even_sizes(blurry, tasks)[::-1])
        if self.sizes == "equal":
            of_disjoint = np.array(even_sizes(disjoint, tasks))
        else:
            least = (of_blurry == 0).astype(np.int64)
            spread = disjoint - int(least.sum())
            # Stars and bars: every way to divide them is equally likely.
            bars = np.sort(rng.choice(spread + tasks - 1, tasks - 1, replace=False))
            of_disjoint = least + np.diff(bars, prepend=-1, append=spread + tasks - 1) - 1
        return np.concatenate([np.repeat(np.arange(tasks), sizes) for sizes in (of_disjoint, of_blurry)])

    def _leaving(self, place: np.ndarray, task: np.ndarray, shares: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Indices (m,) of the samples of blurry classes that leave their home task.

        Args:
            place, task: (n,) class and home task of each.
            shares: (T,) each task's share of all that leave; adds up to 1.
        """
        if self.sizes == "equal":
            by_class = np.lexsort((rng.random(len(place)), place))
            ordered = place[by_class]
            first = np.searchsorted(ordered, ordered)
            size = np.searchsorted(ordered, ordered, side="right") - first
            # Rounded at random, so that the expected share is exact even for classes with few samples.
            number = np.floor(self.blurry * size + rng.random(len(place))[first])
            return by_class[np.arange(len(place)) - first < number]
        # A race of exponential clocks: the earliest samples leave. A task's share sets the rate of its samples; if a
        # task runs out of samples, the other tasks fill its places, so the total is always the same.
        speed = shares / np.maximum(np.bincount(task, minlength=len(shares)), 1)
        arrival = np.log(rng.standard_exponential(len(place))) - np.log(speed[task])
        return np.argsort(arrival)[: int(self.blurry * len(place) + rng.random())]

    def _destinations(self, task: np.ndarray, tasks: int, rng: np.random.Generator) -> np.ndarray:
        """The new tasks (m,) of the samples that leave, given their home tasks."""
        if self.reassign == "any":
            return rng.permutation(task)
        return (task + rng.integers(1, tasks, len(task))) % tasks
