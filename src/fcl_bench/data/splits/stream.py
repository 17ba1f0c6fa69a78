"""Time: which samples form task t.

Every sample, for training or for test, belongs to one task at most. A task's classes may come back in later ones.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from fcl_bench.data.sources.base import Dataset
from fcl_bench.errors import UserError, require_count
from fcl_bench.protocol.task import Task
from fcl_bench.randomness import generator

log = logging.getLogger(__name__)

#: Field metadata: part of the run id only if it is not None, so that runs from before the field existed keep theirs.
IDENTITY_IF_SET = {"identity": "if set"}


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
    """What `split=...` names: how a data set is spread over T tasks.

    Each split has a knob `order_seed`: the seed of all of its own draws; None: the run's `seed`. With it a stream stays
    the same while `seed` changes the partition, the labels, the projection and so on.
    """

    name: ClassVar[str]
    order_seed: int | None

    @abstractmethod
    def cut(self, dataset: Dataset, tasks: int, seed: int) -> Stream:
        """Cut `dataset` into `tasks` tasks. Raises a `UserError` where that can't be done."""

    def own_seed(self, seed: int) -> int:
        """The seed of the split's draws, given the run's."""
        return seed if self.order_seed is None else self.order_seed


def check_order_seed(order_seed: int | None, shuffle: bool = True) -> None:
    """Raise a `UserError` for a seed that is none, or that would change nothing."""
    require_count("split.order_seed", order_seed, least=0)
    if order_seed is not None and not shuffle:
        raise UserError(
            f"split.order_seed={order_seed} has nothing to draw with split.shuffle=false", "split.shuffle=true"
        )


@dataclass
class ClassIncremental(TaskSplit):
    """Disjoint classes per task, in a seeded order.

    Args:
        first: classes in the first task; None: as many as in the others.
        shuffle: permute the classes by the seed; false: ascending labels.
        order_seed: see `TaskSplit`.
    """

    name: ClassVar[str] = "class_incremental"
    first: int | None = None
    shuffle: bool = True
    order_seed: int | None = field(default=None, metadata=IDENTITY_IF_SET)

    def __post_init__(self) -> None:
        require_count("split.first", self.first)
        check_order_seed(self.order_seed, self.shuffle)

    def cut(self, dataset: Dataset, tasks: int, seed: int) -> Stream:
        labels = checked_classes(dataset)
        sizes = self._sizes(len(labels), tasks)
        return stream_of_classes(dataset, class_order(labels, self.own_seed(seed), self.shuffle), sizes)

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


def class_order(labels: np.ndarray, seed: int, shuffle: bool = True) -> np.ndarray:
    """The labels (C,) in the order in which tasks take them: the same for every split with this seed."""
    return generator(seed, "class order").permutation(labels) if shuffle else labels


def even_sizes(total: int, tasks: int) -> list[int]:
    """`total` things over `tasks` tasks: equal, the remainder spread over the earlier ones."""
    whole, rest = divmod(total, tasks)
    return [whole + 1] * rest + [whole] * (tasks - rest)


def require_classes(tasks: int, classes: int) -> None:
    """Raise a `UserError` if there are more tasks than classes."""
    if tasks > classes:
        raise UserError(f"tasks={tasks} is more than the {classes} classes", f"1 to {classes}")


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


def stream_of_classes(dataset: Dataset, order: np.ndarray, sizes: list[int]) -> Stream:
    """A stream whose task t holds all samples of its `sizes[t]` classes, taken in `order`."""
    ends = np.cumsum(sizes)

    def members(labels: np.ndarray) -> list[np.ndarray]:
        columns = columns_of(labels, order)
        return parts(np.where(columns < 0, -1, np.searchsorted(ends, columns, side="right")), len(sizes))

    train, test = members(dataset.train.labels), members(dataset.test.labels)
    return stream_of_samples(dataset, order, train, test)


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


def columns_of(labels: np.ndarray, order: np.ndarray) -> np.ndarray:
    """(n,) int64: where each label stands in `order`; -1 where it does not."""
    sorter = np.argsort(order)
    place = np.minimum(np.searchsorted(order, labels, sorter=sorter), len(order) - 1)
    columns = sorter[place]
    return np.where(order[columns] == labels, columns, -1)


def parts(task_of_sample: np.ndarray, tasks: int) -> list[np.ndarray]:
    """Per task, the ascending indices of its samples, given the task of each (n,); -1: of none."""
    by_task = np.argsort(task_of_sample, kind="stable")
    counts = np.bincount(task_of_sample + 1, minlength=tasks + 1)
    return np.split(by_task, np.cumsum(counts)[:-1])[1:]
