"""Tasks that the data files define, for samples that stay at their sites."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fcl_bench.data.groups import parts
from fcl_bench.data.sources.base import Dataset
from fcl_bench.data.splits.base import Stream, TaskSplit, stream_of_samples
from fcl_bench.errors import UserError


@dataclass
class Given(TaskSplit):
    """The tasks that the test samples define: the classes of task t are those of its test samples."""

    name: ClassVar[str] = "given"

    def cut(self, dataset: Dataset, tasks: int, seed: int) -> Stream:
        if not dataset.elsewhere or dataset.test.domains is None:
            raise UserError(f"split=given: data={dataset.name} gives no tasks", "data=sites, or another split")
        task_of, columns = dataset.test.domains, dataset.test.labels
        found = np.unique(task_of)
        if not np.array_equal(found, np.arange(tasks)):
            raise UserError(
                f"tasks={tasks}: the test samples are of the tasks {', '.join(map(str, found[:10]))}",
                f"tasks={len(found)} and test samples of each task from 0",
            )
        test = parts(task_of, tasks)
        stream = stream_of_samples(replace(dataset, train=dataset.test), np.unique(columns), test, test)
        misplaced = np.flatnonzero(stream.class_order != np.arange(len(stream.class_order)))
        if len(misplaced):
            raise UserError(
                f"the test samples' columns leave out {misplaced[0]} where a task brings it",
                "columns from 0 in the order in which tasks bring their classes",
            )
        nothing = np.zeros(0, dtype=np.int64)
        return replace(stream, train_columns=nothing, train=(nothing,) * tasks)
