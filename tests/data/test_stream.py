"""Class-incremental streams."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.data.sources.base import Dataset, Split
from fcl_bench.data.splits.base import stream_of_samples
from fcl_bench.data.splits.class_incremental import ClassIncremental
from fcl_bench.errors import UserError


def dataset_of(train, test) -> Dataset:
    sides = [np.asarray(side, dtype=np.int64) for side in (train, test)]
    return Dataset("made", *(Split(labels, np.zeros((len(labels), 2)), "x") for labels in sides))


@settings(max_examples=60, deadline=None)
@given(classes=st.integers(1, 40), tasks=st.integers(1, 40), seed=st.integers(0, 1000), first=st.integers(1, 40))
def test_tasks_cover_the_data_with_disjoint_classes(classes, tasks, seed, first):
    rng = np.random.default_rng(seed)
    labels = rng.choice(10_000, size=classes, replace=False)
    train = rng.permutation(np.concatenate([labels, rng.choice(labels, 100)]))
    data = dataset_of(train, np.repeat(labels, 2))
    split = ClassIncremental(first=first if first + tasks - 1 <= classes and tasks > 1 else None)
    if tasks > classes:
        with pytest.raises(UserError, match="more than the"):
            split.cut(data, tasks, seed)
        return
    stream = split.cut(data, tasks, seed)
    np.testing.assert_array_equal(np.sort(stream.class_order), np.sort(labels))
    np.testing.assert_array_equal(stream.class_order[stream.train_columns], train)
    for parts, total in ((stream.train, len(train)), (stream.test, 2 * classes)):
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(total))
    for task, members, tests in zip(stream.tasks, stream.train, stream.test, strict=True):
        assert set(stream.train_columns[members]) == set(task.new_columns) == set(stream.test_columns[tests])
        assert task.columns_seen == task.new_columns.stop
    sizes = [len(task.new_columns) for task in stream.tasks]
    if split.first is None:
        assert max(sizes) - min(sizes) <= 1
    else:
        assert sizes[0] == split.first
        assert max(sizes[1:]) - min(sizes[1:]) <= 1


def test_the_seed_orders_the_classes_and_shuffle_false_does_not():
    data = dataset_of(range(30), range(30))
    orders = [ClassIncremental().cut(data, 5, seed).class_order for seed in (0, 0, 1)]
    np.testing.assert_array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])
    np.testing.assert_array_equal(ClassIncremental(shuffle=False).cut(data, 5, 0).class_order, np.arange(30))


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ([], [0], "no train samples"),
        ([0], [], "no test samples"),
        ([0, 1], [2, 3], "no class of the test samples has a training sample"),
    ],
)
def test_data_that_nothing_can_be_learnt_or_tested_on_are_refused(train, test, message):
    with pytest.raises(UserError, match=message):
        ClassIncremental().cut(dataset_of(train, test), 1, 0)


def test_a_class_without_test_samples_is_learnt_and_one_without_training_samples_is_left_out(caplog):
    data = dataset_of([0, 1, 2, 2], [5, 0, 1, 1, 5])
    stream = ClassIncremental(shuffle=False).cut(data, 3, 0)
    assert stream.class_order.tolist() == [0, 1, 2]
    assert [indices.tolist() for indices in stream.train] == [[0], [1], [2, 3]]
    assert [indices.tolist() for indices in stream.test] == [[1], [2, 3], []]
    assert stream.test_columns.tolist() == [-1, 0, 1, 1, -1]
    assert stream.unseen_tests == 2
    assert "no test sample for 1 class (2); they count in no accuracy" in caplog.text
    assert "no training sample for 1 class (5); their 2 test samples are left out" in caplog.text


def test_classes_that_come_back_keep_their_columns():
    data = dataset_of([7, 3, 3, 5, 7, 9], [3, 7, 9, 5, 3])
    parts = [np.array([1]), np.array([0, 2]), np.array([4]), np.array([3, 5])]
    tests = [np.array([0]), np.array([1]), np.array([], dtype=int), np.array([2, 3, 4])]
    stream = stream_of_samples(data, np.array([9, 7, 5, 3]), parts, tests)
    assert stream.class_order.tolist() == [3, 7, 9, 5]
    assert [task.columns for task in stream.tasks] == [(0,), (0, 1), (1,), (2, 3)]
    assert [list(task.new_columns) for task in stream.tasks] == [[0], [1], [], [2, 3]]
    assert [task.columns_seen for task in stream.tasks] == [1, 2, 2, 4]
    assert stream.train_columns.tolist() == [1, 0, 0, 3, 1, 2]
    assert stream.test_columns.tolist() == [0, 1, 2, 3, 0]


def test_a_task_without_a_training_sample_is_refused():
    data = dataset_of([0, 1], [0, 1])
    with pytest.raises(UserError, match="task 1 has no training sample"):
        stream_of_samples(data, np.arange(2), [np.arange(2), np.arange(0)], [np.arange(2), np.arange(0)])


def test_a_first_task_that_leaves_too_few_classes_is_refused():
    data = dataset_of(range(10), range(10))
    with pytest.raises(UserError, match="at most 6"):
        ClassIncremental(first=7).cut(data, 5, 0)
    with pytest.raises(UserError, match=r"split\.first=10"):
        ClassIncremental(first=3).cut(data, 1, 0)
