"""Domain-incremental streams: a domain a task, over one label space."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.data.splits.domain_incremental import DomainIncremental
from fcl_bench.errors import UserError
from tests.data.split_cases import check_cover, check_stream, dataset_of, even_dataset, same

#: As DomainNet's source lists them, and FedProTIP's two orders (E.1).
NAMES = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
ORDER_1 = ["clipart", "real", "painting", "sketch", "infograph", "quickdraw"]


def domains(classes: int = 4, seed: int = 0):
    """Six domains of different size and mixture; every class in every domain."""
    rng = np.random.default_rng(seed)
    sides = []
    for samples in (60, 30):
        labels = np.concatenate([np.tile(np.arange(classes), 6), rng.integers(0, classes, samples)])
        which = np.concatenate(
            [np.repeat(np.arange(6), classes), rng.choice(6, samples, p=[0.3, 0.3, 0.1, 0.1, 0.1, 0.1])]
        )
        shuffle = rng.permutation(len(labels))
        sides.append((labels[shuffle], which[shuffle]))
    return dataset_of(*(side[0] for side in sides), [side[1] for side in sides], NAMES)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(tasks=st.integers(1, 6), seed=st.integers(0, 2**32), order=st.permutations(NAMES))
def test_task_t_is_the_t_th_domain_and_all_of_it(tasks, seed, order):
    data = domains(seed=seed)
    split = DomainIncremental(order=order)
    stream = split.cut(data, tasks, seed)
    check_stream(stream, data)
    assert same(stream, split.cut(data, tasks, seed))
    taken = []
    for side, members in ((data.train, stream.train), (data.test, stream.test)):
        for indices in members:
            [domain] = set(side.domains[indices].tolist())
            np.testing.assert_array_equal(indices, np.flatnonzero(side.domains == domain))
            taken.append(NAMES[domain])
    assert taken[:tasks] == taken[tasks:]
    assert taken[:tasks] == order[:tasks]
    if tasks == 6:
        check_cover(stream, data)
    # The label space is shared: all columns are there from the first task on, and in each.
    assert [list(task.columns) for task in stream.tasks] == [[0, 1, 2, 3]] * tasks
    assert [len(task.new_columns) for task in stream.tasks] == [4] + [0] * (tasks - 1)
    assert stream.class_order.tolist() == [0, 1, 2, 3]


def test_without_an_order_the_domains_come_as_the_data_set_lists_them():
    data = domains()
    assert same(DomainIncremental().cut(data, 6, 0), DomainIncremental(order=list(NAMES)).cut(data, 6, 1))
    assert not same(DomainIncremental().cut(data, 6, 0), DomainIncremental(order=ORDER_1).cut(data, 6, 0))


def test_a_class_that_only_a_later_domain_has_is_new_there():
    data = dataset_of([5, 7, 5, 9], [5, 9, 7], ([0, 0, 1, 1], [0, 1, 1]), ("a", "b"))
    stream = DomainIncremental().cut(data, 2, 0)
    assert [task.columns for task in stream.tasks] == [(0, 1), (0, 2)]
    assert [list(task.new_columns) for task in stream.tasks] == [[0, 1], [2]]
    first = DomainIncremental().cut(data, 1, 0)
    assert first.class_order.tolist() == [5, 7]
    assert first.train_columns.tolist() == [0, 1, 0, -1]
    assert [indices.tolist() for indices in first.test] == [[0]]


@pytest.mark.parametrize(
    ("knobs", "tasks", "message"),
    [
        ({}, 7, r"tasks=7 is more than the 6 domains of data=made \(1 to 6\)"),
        ({"order": ["real", "sketch"]}, 3, r"tasks=3 is more than the 2 domains of split\.order"),
        ({"order": ["real", "skech"]}, 2, r"split\.order: there is no domain skech \(did you mean sketch"),
    ],
)
def test_more_tasks_than_domains_and_unknown_domains_are_refused(knobs, tasks, message):
    with pytest.raises(UserError, match=message):
        DomainIncremental(**knobs).cut(domains(), tasks, 0)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"order": []}, r"split\.order=\[\] is no order"),
        ({"order": ["a", "a"]}, r"split\.order=\[a,a\] is no order"),
    ],
)
def test_an_order_that_is_none_is_refused(knobs, message):
    with pytest.raises(UserError, match=message):
        DomainIncremental(**knobs)


def test_data_without_domains_or_with_an_empty_one_are_refused():
    with pytest.raises(UserError, match="data=made has no domains"):
        DomainIncremental().cut(even_dataset(3, 4, 2), 1, 0)
    data = dataset_of([0, 1], [0, 1], ([0, 0], [0, 1]), ("a", "b"))
    with pytest.raises(UserError, match="the domain b has no training sample"):
        DomainIncremental().cut(data, 2, 0)
