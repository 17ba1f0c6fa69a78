"""Si-Blurry streams: how many classes are blurry, how many samples leave, and where to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.data.splits.base import Stream, class_order
from fcl_bench.data.splits.si_blurry import SiBlurry
from fcl_bench.errors import UserError
from fcl_bench.typed import typed_instance
from tests.data.split_cases import class_table, dataset_of, even_dataset, same

CIFAR = even_dataset(100, 100, 20)


def disjoint_columns(stream: Stream, seed: int, number: int) -> np.ndarray:
    """(C,) bool: the columns of the classes that the seed's order begins with."""
    return np.isin(stream.class_order, class_order(np.sort(stream.class_order), seed)[:number])


def home_of(table: np.ndarray) -> np.ndarray:
    """(C,) the task that holds most of each class, which is its home if less than half of it leaves."""
    return table.argmax(axis=0)


@settings(max_examples=50, deadline=None)
@given(
    classes=st.integers(1, 30),
    tasks=st.integers(2, 8),
    disjoint=st.floats(0, 1),
    blurry=st.floats(0.02, 0.4),
    seed=st.integers(0, 2**32),
)
def test_equal_sizes_are_equal_and_the_stated_share_of_each_blurry_class_leaves(classes, tasks, disjoint, blurry, seed):
    split, data = SiBlurry(disjoint, blurry, sizes="equal"), even_dataset(classes, 60, 55)
    if tasks > classes:
        with pytest.raises(UserError, match="is more than the"):
            split.cut(data, tasks, seed)
        return
    stream = split.cut(data, tasks, seed)
    home = home_of(class_table(stream))
    np.testing.assert_array_equal(home, home_of(class_table(stream, "test")))
    for side, size in (("train", 60), ("test", 55)):
        table = class_table(stream, side)
        left = size - table[home, np.arange(classes)]
        assert np.isin(left, [0, np.floor(blurry * size), np.ceil(blurry * size)]).all()
        assert (left > 0).sum() == classes - round(disjoint * classes)
    assert np.ptp(np.bincount(home, minlength=tasks)) <= 1
    assert np.ptp(np.bincount(home[left > 0], minlength=tasks)) <= 1
    assert np.ptp(np.bincount(home[left == 0], minlength=tasks)) <= 1


@pytest.mark.parametrize("sizes", ["random", "equal"])
def test_afcls_setting_has_half_of_the_classes_disjoint_and_a_tenth_of_the_other_samples_elsewhere(sizes):
    """AFCL F.1: disjoint classes 50 %, blurry samples 10 %."""
    for seed in range(5):
        stream = SiBlurry(sizes=sizes).cut(CIFAR, 5, seed)
        for side, size in (("train", 100), ("test", 20)):
            table = class_table(stream, side)
            left = size - table[home_of(table), np.arange(100)]
            assert (left[disjoint_columns(stream, seed, 50)] == 0).all()
            assert left.sum() == pytest.approx(50 * size * 0.1, abs=1 if sizes == "random" else 25)
        # Blurry classes have homes in equal numbers.
        blurry = ~disjoint_columns(stream, seed, 50)
        assert np.bincount(home_of(class_table(stream))[blurry], minlength=5).tolist() == [10] * 5


@pytest.mark.slow
def test_random_sizes_differ_between_tasks_and_are_equal_in_the_mean():
    """Of D disjoint classes T tasks have D / T each in the mean, and of what leaves each gives 1 / T."""
    data, disjoint, left = even_dataset(20, 40, 1), [], []
    for seed in range(400):
        stream = SiBlurry(blurry=0.05).cut(data, 4, seed)
        table = class_table(stream)
        home = home_of(table)
        disjoint.append(np.bincount(home[disjoint_columns(stream, seed, 10)], minlength=4))
        left.append(np.bincount(home, 40 - table[home, np.arange(20)], minlength=4) / (0.05 * 10 * 40))
    for draws, mean in ((np.array(disjoint), 2.5), (np.array(left), 0.25)):
        error = draws.std(axis=0, ddof=1) / np.sqrt(len(draws))
        assert (np.abs(draws.mean(axis=0) - mean) < 4.5 * error).all()
        # Equal sizes would have a standard deviation of 0; that of uniform cuts is near their mean.
        assert (draws.std(axis=0) > 0.5 * mean).all()


@pytest.mark.parametrize("sizes", ["random", "equal"])
def test_with_any_every_task_keeps_its_number_of_blurry_samples(sizes):
    for seed in range(5):
        stream = SiBlurry(blurry=0.3, sizes=sizes, reassign="any").cut(CIFAR, 5, seed)
        table, blurry = class_table(stream), ~disjoint_columns(stream, seed, 50)
        np.testing.assert_array_equal(table[:, blurry].sum(axis=1), np.full(5, 10 * 100))


def test_samples_that_leave_are_spread_evenly_over_the_other_tasks_and_over_the_file():
    stream = SiBlurry(disjoint=0, sizes="equal").cut(even_dataset(8, 2000, 1), 4, 0)
    table = class_table(stream)
    home = home_of(table)
    for column in range(8):
        elsewhere = np.delete(table[:, column], home[column])
        assert elsewhere.sum() == 200
        assert (np.abs(elsewhere - 200 / 3) < 5 * np.sqrt(200 / 3)).all()
    left = np.concatenate([m[home[stream.train_columns[m]] != task] for task, m in enumerate(stream.train)])
    assert abs(left.mean() / 16_000 - 0.5) < 5 * np.sqrt(1 / 12 / len(left))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.sampled_from(["random", "equal"]),
    reassign=st.sampled_from(["others", "any"]),
    tasks=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
def test_the_ends_of_both_shares(sizes, reassign, tasks, seed):
    data = even_dataset(6, 30, 12)
    knobs = {"sizes": sizes, "reassign": reassign}
    none_blurry = SiBlurry(1, 0.7, **knobs).cut(data, tasks, seed)
    none_leave = SiBlurry(0.3, 0, **knobs).cut(data, tasks, seed)
    for stream in (none_blurry, none_leave):
        assert ((class_table(stream) > 0).sum(axis=0) == 1).all()
        assert all(len(task.columns) for task in stream.tasks)
    all_leave = SiBlurry(0, 1, sizes="equal", reassign=reassign).cut(data, tasks, seed)
    if tasks == 6 and reassign == "others":
        # A class a task, and no sample of it stays there: each class is in at most five tasks.
        assert ((class_table(all_leave) > 0).sum(axis=0) <= 5).all()


def test_the_share_is_right_in_the_mean_for_classes_with_few_samples():
    data = even_dataset(20, 3, 2)
    left = 0
    for seed in range(150):
        table = class_table(SiBlurry(disjoint=0, sizes="equal").cut(data, 4, seed))
        left += 60 - table.max(axis=0).sum()
    # One of three leaves at most (0.1 of them), and two of three still make the home.
    assert left / 150 == pytest.approx(6, abs=0.9)


def test_a_task_without_blurry_classes_still_has_a_class():
    for seed in range(50):
        stream = SiBlurry(disjoint=0.9, blurry=0).cut(dataset_of(range(10), range(10)), 10, seed)
        assert [len(task.columns) for task in stream.tasks] == [1] * 10


def test_the_seed_of_the_order_fixes_the_stream():
    split = SiBlurry(order_seed=3)
    assert same(split.cut(CIFAR, 5, 0), split.cut(CIFAR, 5, 9))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"disjoint": 1.1}, r"split\.disjoint=1\.1 is out of range \(a share, 0 to 1\)"),
        ({"blurry": -0.1}, r"split\.blurry=-0\.1 is out of range"),
        ({"blurry": float("nan")}, r"split\.blurry=nan is out of range"),
        ({"sizes": "even"}, r"split\.sizes=even is not known"),
        ({"reassign": "all"}, r"split\.reassign=all is not known"),
    ],
)
def test_impossible_knobs_are_refused(knobs, message):
    with pytest.raises(UserError, match=message):
        typed_instance(SiBlurry, knobs, "split")
