"""Time: which classes, and so which samples, form task t."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fcl_bench.data.sources import Dataset
from fcl_bench.errors import UserError, require_count
from fcl_bench.randomness import generator


@dataclass(frozen=True)
class Task:
    """Task t of the stream, as everyone in the federation knows it.

    Attributes:
        index: t, from 0.
        new_columns: the columns of the label matrix that this task's classes take (columns are in order of first
            appearance in the stream).
        columns_seen: C_t, the number of classes seen up to and including this task.
    """

    index: int
    new_columns: range
    columns_seen: int


@dataclass(frozen=True)
class Stream:
    """A data set cut into tasks.

    Attributes:
        tasks: the T tasks in order.
        class_order: (C,) int64, the source's label of each column.
        train_columns, test_columns: (n,) int64, each sample's label as a column.
        train, test: per task, the indices of its samples, ascending.
    """

    tasks: tuple[Task, ...]
    class_order: np.ndarray
    train_columns: np.ndarray
    test_columns: np.ndarray
    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]


class TaskSplit(ABC):
    """What `split=...` names: how the classes of a data set are spread over T tasks."""

    name: ClassVar[str]

    @abstractmethod
    def cut(self, dataset: Dataset, tasks: int, seed: int) -> Stream:
        """Cut `dataset` into `tasks` tasks. Raises a `UserError` where that can't be done."""


@dataclass
class ClassIncremental(TaskSplit):
    """Disjoint classes per task, in a seeded order.

    Args:
        first: classes in the first task; None: as many as in the others.
        shuffle: permute the classes by the seed; false: ascending labels.
    """

    name: ClassVar[str] = "class_incremental"
    first: int | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        require_count("split.first", self.first)

    def cut(self, dataset: Dataset, tasks: int, seed: int) -> Stream:
        labels = checked_classes(dataset)
        sizes = self._sizes(len(labels), tasks)
        order = generator(seed, "class order").permutation(labels) if self.shuffle else labels
        return stream_of_classes(dataset, order, sizes)

    def _sizes(self, classes: int, tasks: int) -> list[int]:
        """Classes per task: equal, the remainder spread over the earlier ones."""
        if tasks > classes:
            raise UserError(f"tasks={tasks} is more than the {classes} classes", f"1 to {classes}")
        if self.first is None:
            return [len(part) for part in np.array_split(np.arange(classes), tasks)]
        rest, later = classes - self.first, tasks - 1
        if rest < later or (later == 0 and rest > 0):
            most = classes - later
            raise UserError(
                f"split.first={self.first} leaves {max(rest, 0)} classes for {later} further tasks",
                f"split.first={most}" if later == 0 else f"at most {most} with tasks={tasks}",
            )
        return [self.first, *(len(part) for part in np.array_split(np.arange(rest), later) if later)]


def checked_classes(dataset: Dataset) -> np.ndarray:
    """The labels of `dataset`, ascending; each must have training and test samples."""
    for side in ("train", "test"):
        if len(getattr(dataset, side)) == 0:
            raise UserError(f"data={dataset.name} has no {side} samples", "at least one for each class")
    train, test = np.unique(dataset.train.labels), np.unique(dataset.test.labels)
    for has, lacks, where in ((train, test, "test"), (test, train, "training")):
        missing = np.setdiff1d(has, lacks)
        if len(missing):
            shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            raise UserError(
                f"data={dataset.name}: no {where} sample for {len(missing)} of {len(np.union1d(train, test))} classes"
                f" ({shown})",
                "the same labels in train and test",
            )
    return train


def stream_of_classes(dataset: Dataset, class_order: np.ndarray, sizes: list[int]) -> Stream:
    """A stream whose task t holds all samples of its `sizes[t]` classes, taken in `class_order`."""
    sorter = np.argsort(class_order)
    train, test = (
        sorter[np.searchsorted(class_order, split.labels, sorter=sorter)] for split in (dataset.train, dataset.test)
    )
    ends = np.cumsum(sizes)
    tasks = tuple(
        Task(index, range(int(end) - size, int(end)), int(end))
        for index, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )

    def members(columns: np.ndarray) -> tuple[np.ndarray, ...]:
        task_of_sample = np.searchsorted(ends, columns, side="right")
        by_task = np.argsort(task_of_sample, kind="stable")
        counts = np.bincount(task_of_sample, minlength=len(sizes))
        return tuple(np.split(by_task, np.cumsum(counts)[:-1]))

    return Stream(tasks, np.asarray(class_order), train, test, members(train), members(test))
