"""Time: one domain per task; or the tasks that the files of a site define."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fcl_bench.data.sources.base import Dataset, Split, parts
from fcl_bench.data.splits.base import Division, SampleSplit, Stream, TaskSplit, checked_classes, stream_of_samples
from fcl_bench.errors import UserError, choices

log = logging.getLogger(__name__)


@dataclass
class DomainIncremental(SampleSplit):
    """Task t holds all samples of one domain (FedProTIP 4, E.1).

    With fewer tasks than domains, T tasks have the first T domains, and the samples of the others are left out. The
    classes that are new in a task take columns in ascending order of their labels.

    Args:
        order: the names of the tasks' domains; None: as the data set lists them.
    """

    name: ClassVar[str] = "domain_incremental"
    order: list[str] | None = None

    def __post_init__(self) -> None:
        if self.order is not None and (not self.order or len(set(self.order)) < len(self.order)):
            raise UserError(
                f"split.order=[{','.join(self.order)}] is no order of domains", "each domain once, at least one"
            )
        if self.order_seed is not None and self.imbalance == 1:
            raise UserError(f"split.order_seed={self.order_seed} has nothing to draw", "split.imbalance below 1")

    def divide(self, dataset: Dataset, tasks: int, seed: int) -> Division:
        names = dataset.domain_names
        if not names or dataset.train.domains is None or dataset.test.domains is None:
            raise UserError(
                f"split={self.name}: data={dataset.name} has no domains",
                "a data set with domains, such as data=domainnet, or split=class_incremental",
            )
        order = self._order(names)
        if tasks > len(order):
            raise UserError(
                f"tasks={tasks} is more than the {len(order)} domains of"
                f" {f'data={dataset.name}' if self.order is None else 'split.order'}",
                f"1 to {len(order)}",
            )
        if tasks < len(order):
            log.info(
                "split %s: without the domains %s", self.name, ", ".join(names[domain] for domain in order[tasks:])
            )
        task_of_domain = np.full(len(names), -1)
        task_of_domain[order[:tasks]] = np.arange(tasks)

        def members(side: Split) -> list[np.ndarray]:
            assert side.domains is not None
            return parts(task_of_domain[side.domains], tasks)

        train = members(dataset.train)
        for task, indices in enumerate(train):
            if not len(indices):
                raise UserError(
                    f"data={dataset.name}: the domain {names[order[task]]} has no training sample",
                    "split.order without it, or more samples",
                )
        return Division(checked_classes(dataset), train, members(dataset.test))

    def _order(self, names: tuple[str, ...]) -> np.ndarray:
        """The numbers of the tasks' domains."""
        if self.order is None:
            return np.arange(len(names))
        for name in self.order:
            if name not in names:
                raise UserError(f"split.order: there is no domain {name}", choices(names, name))
        return np.array([names.index(name) for name in self.order])


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
