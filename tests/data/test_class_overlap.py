"""Class-overlapping streams: FedProTIP's numbers, what neighbours share, and how a shared class is divided."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.data.splits.class_incremental import ClassOverlap
from fcl_bench.errors import UserError
from fcl_bench.typed import typed_instance
from tests.data.split_cases import class_table, dataset_of, even_dataset


@pytest.mark.parametrize(("shared", "tasks", "size"), [(1, 11, 10), (2, 14, 9)])
def test_the_papers_two_settings_come_out_as_printed(shared, tasks, size):
    """FedProTIP D.6 on CIFAR-100: 10 classes and 11 tasks with one shared class, 9 and 14 with two."""
    stream = ClassOverlap(shared=shared).cut(even_dataset(100, 10, 4), tasks, 0)
    assert [len(task.columns) for task in stream.tasks] == [size] * tasks
    assert [len(task.new_columns) for task in stream.tasks] == [size] + [size - shared] * (tasks - 1)
    assert stream.tasks[-1].columns_seen == 100
    # A shared class has half of its 10 training and of its 4 test samples in either task.
    assert [len(members) for members in stream.train] == [
        10 * size - 5 * shared * (1 + (0 < t < tasks - 1)) for t in range(tasks)
    ]
    assert [len(members) for members in stream.test] == [
        4 * size - 2 * shared * (1 + (0 < t < tasks - 1)) for t in range(tasks)
    ]


@settings(max_examples=40, deadline=None)
@given(
    classes=st.integers(1, 60),
    tasks=st.integers(1, 20),
    shared=st.integers(1, 5),
    samples=st.integers(2, 9),
    seed=st.integers(0, 2**32),
)
def test_neighbours_share_so_many_classes_and_others_none(classes, tasks, shared, samples, seed):
    data, split = even_dataset(classes, samples, samples + 1), ClassOverlap(shared=shared)
    if tasks > 1 and classes < shared * (tasks + 1):
        with pytest.raises(UserError, match=f"needs {shared * (tasks + 1)} classes") as caught:
            split.cut(data, tasks, seed)
        most = classes // shared - 1
        if most > 1:
            assert f"tasks={most} at most" in caught.value.remedy
            split.cut(data, most, seed)
        return
    stream = split.cut(data, tasks, seed)
    held = [set(task.columns) for task in stream.tasks]
    sizes = [len(columns) for columns in held]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == classes + (tasks - 1) * shared
    for earlier in range(tasks):
        for later in range(earlier + 1, tasks):
            assert len(held[earlier] & held[later]) == (shared if later == earlier + 1 else 0)
    for table in (class_table(stream), class_table(stream, "test")):
        both = (table > 0).sum(axis=0) == 2
        assert both.sum() == (tasks - 1) * shared
        divided = np.sort(table[:, both], axis=0)[-2:]
        assert (np.ptp(divided, axis=0) <= 1).all()


@pytest.mark.slow
def test_which_half_is_random_and_so_is_the_odd_sample():
    data = even_dataset(3, 3, 3)
    first = np.zeros(3)
    for seed in range(600):
        stream = ClassOverlap().cut(data, 2, seed)
        # The second class is shared; the training samples of class c are c, c + 3 and c + 6.
        first += np.isin(stream.class_order[1] + np.array([0, 3, 6]), stream.train[0])
    np.testing.assert_allclose(first / 600, 0.5, atol=0.1)


def test_the_one_sample_of_a_shared_class_is_in_one_of_its_tasks():
    data = dataset_of([0, 1, 2], [0, 1, 2])
    columns = {ClassOverlap().cut(data, 2, seed).tasks[0].columns for seed in range(20)}
    assert columns == {(0,), (0, 1)}


def test_no_shared_class_is_another_split():
    with pytest.raises(UserError, match=r"split\.shared=0 is out of range"):
        typed_instance(ClassOverlap, {"shared": 0}, "split")
