"""Time: class-incremental streams, with disjoint classes or with classes that neighbouring tasks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.sources.base import Dataset, parts, rank_in_group
from fcl_bench.data.splits.base import (
    Division,
    SampleSplit,
    checked_classes,
    class_order,
    columns_of,
    even_sizes,
    require_classes,
)
from fcl_bench.errors import UserError
from fcl_bench.randomness import generator, legacy_generator


@dataclass
class ClassIncremental(SampleSplit):
    """Disjoint classes per task, in a seeded order."""

    name: ClassVar[str] = "class_incremental"
    first: int | None = knob(None, least=1)
    shuffle: bool = True
    order: str | None = knob(None, choices=("published",), identity=False)

    def __post_init__(self) -> None:
        if self.order and not self.shuffle:
            raise UserError(f"split.order={self.order} is a shuffled one", "split.shuffle=true, or split.order=null")
        if self.order_seed is not None and not self.shuffle and self.imbalance == 1:
            raise UserError(
                f"split.order_seed={self.order_seed} has nothing to draw with split.shuffle=false",
                "split.shuffle=true",
            )

    def contents(self) -> dict[str, str]:
        """The part of a run's identity that only some runs have."""
        return {"order": self.order} if self.order else {}

    def divide(self, dataset: Dataset, tasks: int, seed: int) -> Division:
        labels = checked_classes(dataset)
        sizes = self._sizes(len(labels), tasks)
        if self.order:
            order = labels[legacy_generator(seed).permutation(len(labels))]
        else:
            order = class_order(labels, seed, self.shuffle)
        # A label that is not in the order has column -1 and task -1.
        home = np.append(np.repeat(np.arange(tasks), sizes), -1)
        train, test = (parts(home[columns_of(side.labels, order)], tasks) for side in (dataset.train, dataset.test))
        return Division(order, train, test)

    def _sizes(self, classes: int, tasks: int) -> list[int]:
        """Classes per task: equal numbers, with the remainder spread over the earlier tasks."""
        require_classes(tasks, classes)
        if self.first is None:
            return even_sizes(classes, tasks)
        rest, later = classes - self.first, tasks - 1
        if rest < later or (later == 0 and rest > 0):
            most = classes - later
            raise UserError(
                f"split.first={self.first} leaves {max(rest, 0)} classes for {later} further tasks",
                f"split.first={most}" if later == 0 else f"at most {most} with tasks={tasks}",
            )
        return [self.first, *(even_sizes(rest, later) if later else ())]


@dataclass
class ClassOverlap(SampleSplit):
    """Tasks of equal size in a seeded order of the classes, each with its neighbour's `shared` classes (FedProTIP D.6).

    With C classes, T tasks and s shared at each border the tasks' sizes add up to C + (T - 1) s, and differ by one at
    most. Each of two tasks gets a random half of a shared class's training and test samples.
    """

    name: ClassVar[str] = "class_overlap"
    shared: int = knob(1, least=1)

    def divide(self, dataset: Dataset, tasks: int, seed: int) -> Division:
        labels = checked_classes(dataset)
        starts = self._starts(len(labels), tasks)
        order = class_order(labels, seed)
        places = np.arange(len(labels))
        last = np.searchsorted(starts, places, side="right") - 1
        # A task shares its first `shared` classes with the task before it.
        both = (last > 0) & (places - starts[last] < self.shared)

        def members(labels: np.ndarray, side: int) -> list[np.ndarray]:
            place = columns_of(labels, order)
            earlier = _halves(place, generator(seed, "shared classes", side)) & both[place]
            return parts(np.where(place < 0, -1, last[place] - earlier), tasks)

        return Division(order, members(dataset.train.labels, 0), members(dataset.test.labels, 1))

    def _starts(self, classes: int, tasks: int) -> np.ndarray:
        """Each task's first position in the order of the classes (T,)."""
        if tasks > 1 and classes < self.shared * (tasks + 1):
            most = classes // self.shared - 1
            raise UserError(
                f"split.shared={self.shared} with tasks={tasks} needs {self.shared * (tasks + 1)} classes,"
                f" and there are {classes}: no class may be in three tasks",
                f"tasks={most} at most"
                if most > 1
                else f"split.shared={max(1, classes // (tasks + 1))}, or fewer tasks",
            )
        sizes = even_sizes(classes + (tasks - 1) * self.shared, tasks)
        return np.cumsum([0, *(size - self.shared for size in sizes[:-1])])


def _halves(place: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random half of the samples of each class (n,) bool, given the class of each."""
    rank = rank_in_group(place, rng.random(len(place)))
    # Every second sample in a random order; whether the first one counts is random too.
    offset = rng.integers(0, 2, len(place))[np.searchsorted(np.sort(place), place)]
    return (rank + offset) % 2 == 0
