"""Time: which samples form task t.

Every sample, for training or for test, belongs to one task at most. A task's classes may come back in later ones.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fcl_bench.data.sources import Dataset
from fcl_bench.errors import UserError, require_count
from fcl_bench.randomness import generator

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """Task t of the stream, as everyone in the federation knows it.

    Attributes:
        index: t, from 0.
        new_columns: the columns of the label matrix that classes which are new in this task take (columns are in order
            of first appearance in the stream).
        columns_seen: C_t, the number of classes seen up to and including this task.
        columns: of all classes that the task has training samples of, ascending; by default those that are new.
    """

    index: int
    new_columns: range
    columns_seen: int
    columns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.columns:
            object.__setattr__(self, "columns", tuple(self.new_columns))


@dataclass(frozen=True)
class Stream:
    """A data set cut into tasks.

    Attributes:
        tasks: the T tasks in order.
        class_order: (C,) int64, the source's label of each column.
        train_columns, test_columns: (n,) int64, each sample's label as a column; -1 for a class that is never learnt.
        train, test: per task, the indices of its samples, ascending; disjoint. Test samples are divided like training
            samples, so that a class that comes back is tested in each of its tasks, on other samples.
    """

    tasks: tuple[Task, ...]
    class_order: np.ndarray
    train_columns: np.ndarray
    test_columns: np.ndarray
    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]

    @property
    def unseen_tests(self) -> int:
        """Test samples of classes that are never learnt; they count in no accuracy."""
        return int((self.test_columns < 0).sum())


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
    """The labels of the training samples, ascending.

    Warns of classes that have no test sample (they are learnt, and count in no accuracy) and of test samples whose
    class has no training sample (no closed-world accuracy is defined on them, so they are left out).
    """
    for side in ("train", "test"):
        if len(getattr(dataset, side)) == 0:
            raise UserError(f"data={dataset.name} has no {side} samples", "at least one for each class")
    train, test = np.unique(dataset.train.labels), np.unique(dataset.test.labels)
    untested, unseen = np.setdiff1d(train, test), np.setdiff1d(test, train)
    if len(unseen) == len(test):
        raise UserError(
            f"data={dataset.name}: no class of the test samples has a training sample",
            "the same labels in train and test",
        )
    if len(untested):
        log.warning("data %s: no test sample for %s; they count in no accuracy", dataset.name, _shown(untested))
    if len(unseen):
        count = int(np.isin(dataset.test.labels, unseen).sum())
        log.warning(
            "data %s: no training sample for %s; their %d test samples are left out",
            dataset.name,
            _shown(unseen),
            count,
        )
    return train


def _shown(labels: np.ndarray) -> str:
    shown = ", ".join(map(str, labels[:5])) + (", ..." if len(labels) > 5 else "")
    return f"{len(labels)} class{'es' if len(labels) > 1 else ''} ({shown})"


def stream_of_classes(dataset: Dataset, class_order: np.ndarray, sizes: list[int]) -> Stream:
    """A stream whose task t holds all samples of its `sizes[t]` classes, taken in `class_order`."""
    ends = np.cumsum(sizes)

    def members(labels: np.ndarray) -> list[np.ndarray]:
        columns = columns_of(labels, class_order)
        return parts(np.where(columns < 0, -1, np.searchsorted(ends, columns, side="right")), len(sizes))

    train, test = members(dataset.train.labels), members(dataset.test.labels)
    return stream_of_samples(dataset, class_order, train, test)


def stream_of_samples(
    dataset: Dataset, preference: np.ndarray, train: Sequence[np.ndarray], test: Sequence[np.ndarray]
) -> Stream:
    """A stream of given samples.

    Args:
        dataset: what the indices are of.
        preference: all labels that are trained; those new in the same task take columns in this order.
        train, test: per task, indices, ascending; disjoint among tasks. Test samples of classes that no task trains
            are dropped.

    Raises:
        UserError: a task without a training sample.
    """
    labels, seen = dataset.train.labels, np.zeros(0, dtype=np.int64)
    present = [np.unique(labels[indices]) for indices in train]
    for index, found in enumerate(present):
        if not len(found):
            raise UserError(f"tasks={len(present)}: task {index} has no training sample", "fewer tasks")
        seen = np.concatenate([seen, preference[np.isin(preference, found) & ~np.isin(preference, seen)]])
    tasks, before = [], 0
    for index, found in enumerate(present):
        columns = np.sort(columns_of(found, seen))
        after = max(before, int(columns[-1]) + 1)
        tasks.append(Task(index, range(before, after), after, tuple(columns.tolist())))
        before = after
    test_columns = columns_of(dataset.test.labels, seen)
    kept = tuple(indices[test_columns[indices] >= 0] for indices in test)
    return Stream(tuple(tasks), seen, columns_of(labels, seen), test_columns, tuple(train), kept)


def columns_of(labels: np.ndarray, class_order: np.ndarray) -> np.ndarray:
    """(n,) int64: where each label stands in `class_order`; -1 where it does not."""
    sorter = np.argsort(class_order)
    place = np.minimum(np.searchsorted(class_order, labels, sorter=sorter), len(class_order) - 1)
    columns = sorter[place]
    return np.where(class_order[columns] == labels, columns, -1)


def parts(task_of_sample: np.ndarray, tasks: int) -> list[np.ndarray]:
    """Per task, the ascending indices of its samples, given the task of each (n,); -1: of none."""
    by_task = np.argsort(task_of_sample, kind="stable")
    counts = np.bincount(task_of_sample + 1, minlength=tasks + 1)
    return np.split(by_task, np.cumsum(counts)[:-1])[1:]
