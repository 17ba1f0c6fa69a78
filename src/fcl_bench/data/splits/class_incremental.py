"""Time: disjoint classes per task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.groups import parts
from fcl_bench.data.sources.base import Dataset
from fcl_bench.data.splits.base import (
    TaskSplit,
    checked_classes,
    class_order,
    even_sizes,
    require_classes,
)
from fcl_bench.data.splits.stream import Stream, columns_of, stream_of_samples
from fcl_bench.errors import UserError


@dataclass
class ClassIncremental(TaskSplit):
    """Disjoint classes per task, in a seeded order.

    Args:
        first: classes in the first task; None: as many as in the others.
        shuffle: permute the classes by the seed; false: ascending labels.
    """

    name: ClassVar[str] = "class_incremental"
    first: int | None = knob(None, least=1)
    shuffle: bool = True

    @property
    def draws(self) -> bool:
        return self.shuffle

    def cut(self, dataset: Dataset, tasks: int, seed: int) -> Stream:
        labels = checked_classes(dataset)
        sizes = self._sizes(len(labels), tasks)
        order = class_order(labels, self.own_seed(seed), self.shuffle)
        # Where a label is not in the order, its column is -1 and so is its task.
        home = np.append(np.repeat(np.arange(tasks), sizes), -1)
        train, test = (parts(home[columns_of(side.labels, order)], tasks) for side in (dataset.train, dataset.test))
        return stream_of_samples(dataset, order, train, test)

    def _sizes(self, classes: int, tasks: int) -> list[int]:
        """Classes per task: equal, the remainder spread over the earlier ones."""
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
