"""A data set cut into tasks, the base class of what `split=...` names, and functions that the splits share.

Every training or test sample belongs to at most one task. A task's classes may come back in later tasks.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.partitions.base import Holdings, Partition
from fcl_bench.data.sources.base import Dataset, rank_in_group
from fcl_bench.errors import UserError
from fcl_bench.protocol.context import Task
from fcl_bench.randomness import generator

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stream:
    """A data set cut into tasks.

    Attributes:
        class_order: (C,) int64, the source's label of each column.
        train_columns, test_columns: (n,) int64, each sample's label as a column, also for samples in no task; -1 for a
            class that is never learnt.
        train, test: per task, the indices of its samples, ascending; disjoint. Test samples are divided like training
            samples, so that a class that comes back is tested in each of its tasks, on other samples.
        validation: per task, the training samples that are held out of `train` (`data.validation`); empty: none are.
        in_step: whether all clients work on the same task at the same time.
    """

    tasks: tuple[Task, ...]
    class_order: np.ndarray
    train_columns: np.ndarray
    test_columns: np.ndarray
    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]
    validation: tuple[np.ndarray, ...] = ()
    in_step: bool = True

    @property
    def class_samples(self) -> np.ndarray:
        """(C,) how many training samples each class has in all tasks together."""
        return np.bincount(self.train_columns[np.concatenate(self.train)], minlength=len(self.class_order))

    @property
    def test_sizes(self) -> np.ndarray:
        """(T,) how many test samples each task has."""
        return np.array([len(indices) for indices in self.test])

    @property
    def validation_sizes(self) -> np.ndarray:
        """(T,) how many validation samples each task has."""
        return np.array([len(indices) for indices in self.validation])

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


class Division(NamedTuple):
    """A data set's samples, divided among the tasks.

    Attributes:
        preference: all labels that are trained; those new in the same task take columns in this order.
        train, test: per task, the indices of its samples, ascending; disjoint among tasks.
    """

    preference: np.ndarray
    train: Sequence[np.ndarray]
    test: Sequence[np.ndarray]


class TaskSplit(ABC):
    """What `split=...` names: how a data set is spread over T tasks."""

    name: ClassVar[str]

    @abstractmethod
    def cut(self, dataset: Dataset, tasks: int, seed: int) -> Stream:
        """Cut `dataset` into `tasks` tasks, given the run's seed. Raises a `UserError` where that can't be done."""

    def deal(
        self, dataset: Dataset, partition: Partition, tasks: int, clients: int, seed: int
    ) -> tuple[Stream, list[Holdings]]:
        """The stream, and per task the clients' training samples. Raises like `cut`."""
        stream = self.cut(dataset, tasks, seed)
        groups = partition.groups(dataset.train, stream.train_columns)
        dealt = partition.deal([groups[own] for own in stream.train], [clients] * tasks, seed)
        shards = [Holdings(own[held.indices], held.ends) for own, held in zip(stream.train, dealt, strict=True)]
        return stream, shards


@dataclass(kw_only=True)
class SampleSplit(TaskSplit):
    """A split that divides the samples of a data set by a rule."""

    imbalance: float = knob(1.0, above=0, most=1, words="a share, above 0 to 1")
    order_seed: int | None = knob(None, least=0)

    def cut(self, dataset: Dataset, tasks: int, seed: int) -> Stream:
        seed = seed if self.order_seed is None else self.order_seed
        preference, train, test = self.divide(dataset, tasks, seed)
        if self.imbalance < 1:
            train = thinned(train, dataset.train.labels, self.imbalance, seed)
        return stream_of_samples(dataset, preference, train, test)

    @abstractmethod
    def divide(self, dataset: Dataset, tasks: int, seed: int) -> Division:
        """Divide all samples among `tasks` tasks. Raises a `UserError` where that can't be done.

        Args:
            dataset: the whole data set; samples that `imbalance` removes are removed afterwards.
        """


def thinned(members: Sequence[np.ndarray], labels: np.ndarray, imbalance: float, seed: int) -> list[np.ndarray]:
    """`members` without the samples that class imbalance removes.

    Class number i of C, in a random order of its own, retains the share imbalance^(i / (C - 1)) of its samples, rounded
    to the nearest number and at least one. Which samples stay is random, independent of their task.

    Args:
        members: per task, the indices of its training samples, ascending.
        imbalance: the share that the last class retains.
    """
    indices = np.concatenate(members)
    rng = generator(seed, "class imbalance")
    classes, which, sizes = np.unique(labels[indices], return_inverse=True, return_counts=True)
    shares = np.empty(len(classes))
    shares[rng.permutation(len(classes))] = np.geomspace(1, imbalance, len(classes))
    quota = np.maximum(1, np.rint(shares * sizes))
    # Random keys belong to samples, not to tasks: the same samples stay under every split.
    keys = rng.random(len(labels))[indices]
    stays = rank_in_group(which, keys) < quota[which]
    ends = np.cumsum([len(task) for task in members])[:-1]
    return [task[stay] for task, stay in zip(members, np.split(stays, ends), strict=True)]


def class_order(labels: np.ndarray, seed: int, shuffle: bool = True) -> np.ndarray:
    """The labels (C,) in the order in which tasks take them: the same for every split with this seed."""
    return generator(seed, "class order").permutation(labels) if shuffle else labels


def even_sizes(total: int, tasks: int) -> list[int]:
    """Sizes (T,) of `tasks` equal shares of `total` things; the remainder goes to the earlier ones."""
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
