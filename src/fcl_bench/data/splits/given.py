"""Tasks that the data files define, for samples that stay at their sites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fcl_bench.data.sources.base import Dataset
from fcl_bench.data.splits.base import TaskSplit
from fcl_bench.data.splits.stream import Stream
from fcl_bench.errors import UserError
from fcl_bench.protocol.task import Task


@dataclass
class Given(TaskSplit):
    """The tasks that the test samples define: the classes of task t are those of its test samples."""

    name: ClassVar[str] = "given"

    def cut(self, dataset: Dataset, tasks: int, seed: int) -> Stream:
        """The stream of a data set whose training samples stay at the sites.

        Raises:
            UserError: the training samples are not elsewhere, or the test samples' tasks are not 0 to T - 1, or the
                classes are not in the order of the tasks in which they first appear.
        """
        if not dataset.elsewhere or dataset.test.domains is None:
            raise UserError(f"split=given: data={dataset.name} gives no tasks", "data=sites, or another split")
        task_of, columns = dataset.test.domains, dataset.test.labels
        found = np.unique(task_of)
        if not np.array_equal(found, np.arange(tasks)):
            raise UserError(
                f"tasks={tasks}: the test samples are of the tasks {', '.join(map(str, found[:10]))}",
                f"tasks={len(found)} and test samples of each task from 0",
            )
        made: list[Task] = []
        seen = 0
        for index in range(tasks):
            own = np.unique(columns[task_of == index])
            new = own[own >= seen]
            if not np.array_equal(new, np.arange(seen, seen + len(new))):
                raise UserError(
                    f"the test samples' columns of task {index} leave out numbers from {seen} on",
                    "columns from 0 in the order in which tasks bring their classes",
                )
            before, seen = seen, seen + len(new)
            made.append(Task(index, range(before, seen), seen, tuple(own.tolist()), tuple(new.tolist())))
        nothing = np.zeros(0, dtype=np.int64)
        test = tuple(np.flatnonzero(task_of == index) for index in range(tasks))
        return Stream(tuple(made), np.arange(seen), nothing, columns, (nothing,) * tasks, test)
