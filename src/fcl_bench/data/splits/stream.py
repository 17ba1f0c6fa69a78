"""A data set cut into tasks, made from the samples of each task.

Every training or test sample belongs to at most one task. A task's classes may come back in later tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fcl_bench.data.sources.base import Dataset
from fcl_bench.errors import UserError
from fcl_bench.protocol.task import Task


@dataclass(frozen=True)
class Stream:
    """A data set cut into tasks.

    Attributes:
        tasks: the T tasks in order.
        class_order: (C,) int64, the source's label of each column.
        train_columns, test_columns: (n,) int64, each sample's label as a column, also for samples in no task; -1 for a
            class that is never learnt.
        train, test: per task, the indices of its samples, ascending; disjoint. Test samples are divided like training
            samples, so that a class that comes back is tested in each of its tasks, on other samples.
        validation: per task, the training samples that are held out of `train` (`data.validation`); empty: none are.
    """

    tasks: tuple[Task, ...]
    class_order: np.ndarray
    train_columns: np.ndarray
    test_columns: np.ndarray
    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]
    validation: tuple[np.ndarray, ...] = ()

    @property
    def class_samples(self) -> np.ndarray:
        """(C,) how many training samples each class has in all tasks together."""
        return np.bincount(self.train_columns[np.concatenate(self.train)], minlength=len(self.class_order))

    @property
    def recurring(self) -> bool:
        """Whether a task has classes of an earlier one."""
        return any(len(task.columns) > len(task.new_columns) for task in self.tasks)

    @property
    def unseen_tests(self) -> int:
        """Test samples of classes that are never learnt; they count in no accuracy."""
        return int((self.test_columns < 0).sum())


def stream_of_samples(
    dataset: Dataset, preference: np.ndarray, train: Sequence[np.ndarray], test: Sequence[np.ndarray]
) -> Stream:
    """The stream of given samples per task.

    Args:
        dataset: the data set that the indices refer to.
        preference, train, test: see `Division`; test samples of classes that no task trains are dropped.

    Raises:
        UserError: a task without a training sample.
    """
    labels, seen = dataset.train.labels, np.zeros(0, dtype=np.int64)
    tasks = []
    for index, indices in enumerate(train):
        if not len(indices):
            raise UserError(f"tasks={len(train)}: task {index} has no training sample", "fewer tasks")
        found, before = np.unique(labels[indices]), len(seen)
        seen = np.concatenate([seen, preference[np.isin(preference, found) & ~np.isin(preference, seen)]])
        columns = np.sort(columns_of(found, seen))
        new = tuple(seen[before:].tolist())
        tasks.append(Task(index, range(before, len(seen)), len(seen), tuple(columns.tolist()), new))
    test_columns = columns_of(dataset.test.labels, seen)
    tests = tuple(indices[test_columns[indices] >= 0] for indices in test)
    return Stream(tuple(tasks), seen, columns_of(labels, seen), test_columns, tuple(train), tests)


def columns_of(labels: np.ndarray, order: np.ndarray) -> np.ndarray:
    """(n,) int64: each label's position in `order`; -1 if it is not there."""
    sorter = np.argsort(order)
    place = np.minimum(np.searchsorted(order, labels, sorter=sorter), len(order) - 1)
    columns = sorter[place]
    return np.where(order[columns] == labels, columns, -1)
