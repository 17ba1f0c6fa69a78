"""Clients out of step: who has which sample when, and what of it is tested."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fcl_bench.config import _identity
from fcl_bench.data.partitions.base import Iid
from fcl_bench.data.partitions.dirichlet import Dirichlet
from fcl_bench.data.partitions.power_law import DirichletPowerLaw
from fcl_bench.data.splits.asynchronous import Asynchronous
from fcl_bench.data.splits.class_incremental import ClassIncremental
from fcl_bench.errors import UserError
from fcl_bench.randomness import generator
from tests.data.split_cases import check_cover, check_stream, class_table, dataset_of, even_dataset, same

DATA = even_dataset(12, 60, 20)
CLIENTS, STEPS = 5, 6


def dealt(split, data=DATA, steps=STEPS, clients=CLIENTS, seed=0, partition=None):
    return split.deal(data, partition or Iid(), steps, clients, seed)


def arrivals(split, **problem):
    """Per client, an array of (step, group) of its samples; groups are two classes of `DATA` each."""
    _, shards = dealt(split, **problem)
    groups = len(np.unique(DATA.train.labels)) // 2
    group_of = ClassIncremental().cut(DATA, groups, 0).train_columns // 2
    clients = len(shards[0])
    return [
        np.concatenate([np.stack([np.full(len(own[k]), t), group_of[own[k]]], axis=1) for t, own in enumerate(shards)])
        for k in range(clients)
    ]


@settings(max_examples=10, deadline=None)
@given(
    order=st.sampled_from(["same", "shifted", "independent"]),
    speed=st.sampled_from(["constant", "uniform", "lognormal", "stragglers"]),
    missing=st.sampled_from([0.0, 0.4, 1.0]),
    groups=st.sampled_from([None, 3, 12]),
    seed=st.integers(0, 2**32),
)
def test_every_sample_comes_once_and_each_class_is_tested_from_its_first_step(order, speed, missing, groups, seed):
    split = Asynchronous(order=order, speed=speed, missing=missing, groups=groups)
    try:
        stream, shards = dealt(split, seed=seed)
    except UserError:
        assume(False)  # a step in which nothing comes
    check_stream(stream, DATA)
    check_cover(stream, DATA)
    for own, members in zip(shards, stream.train, strict=True):
        assert np.array_equal(np.sort(own.indices), members)
        assert all((np.diff(own[k]) > 0).all() for k in range(CLIENTS))
    train, test = class_table(stream), class_table(stream, "test")
    assert np.array_equal(np.argmax(train > 0, axis=0), np.argmax(test > 0, axis=0))
    # Test samples come as training samples do: after every step the same share, to one sample.
    assert (np.abs(np.cumsum(test, axis=0) - np.cumsum(train, axis=0) / 3) <= 1).all()
    again, shards_again = dealt(split, seed=seed)
    assert same(stream, again)
    assert all(np.array_equal(a.ends, b.ends) for a, b in zip(shards, shards_again, strict=True))


@pytest.mark.parametrize("knobs", [{}, {"imbalance": 0.2}, {"order_seed": 9}])
def test_one_order_and_one_speed_are_the_synchronous_stream(knobs):
    partition = Dirichlet(0.3)
    ours, held = dealt(Asynchronous(order="same", **knobs), partition=partition, seed=3)
    usual, usually_held = dealt(ClassIncremental(**knobs), partition=partition, seed=3)
    assert same(ours, usual)
    assert ours.in_step
    assert usual.in_step
    for a, b in zip(held, usually_held, strict=True):
        assert np.array_equal(a.indices, b.indices)
        assert np.array_equal(a.ends, b.ends)


@pytest.mark.parametrize(("order", "common"), [("same", True), ("shifted", False), ("independent", False)])
def test_each_client_has_one_group_per_step_in_its_order(order, common):
    found = arrivals(Asynchronous(order=order))
    orders = []
    for own in found:
        pairs = np.unique(own, axis=0)
        assert pairs[:, 0].tolist() == list(range(STEPS))
        orders.append(pairs[:, 1].tolist())
        assert sorted(orders[-1]) == list(range(STEPS))
    assert (len(set(map(tuple, orders))) == 1) == common
    assert dealt(Asynchronous(order=order))[0].in_step == common
    if order == "shifted":
        starts = [k * STEPS // CLIENTS for k in range(CLIENTS)]
        assert orders == [[(start + t) % STEPS for t in range(STEPS)] for start in starts]


def test_stragglers_take_all_steps_and_the_others_a_third():
    found = arrivals(Asynchronous(groups=6, speed="stragglers", stragglers=0.4, slowdown=3), clients=5, steps=18)
    last = sorted(own[:, 0].max() for own in found)
    assert last == [5, 5, 5, 17, 17]
    fast = next(own for own in found if own[:, 0].max() == 5)
    assert len(np.unique(fast, axis=0)) == 6  # one step each


def test_lognormal_clocks_differ_and_no_group_begins_before_the_last_one_ended():
    found = arrivals(Asynchronous(groups=6, speed="lognormal", spread=0.7), steps=12)
    assert max(own[:, 0].max() for own in found) == 11
    assert len({own[:, 0].max() for own in found}) > 1
    for own in found:
        spans = sorted((own[own[:, 1] == g, 0].min(), own[own[:, 1] == g, 0].max()) for g in range(6))
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_uniform_clocks_differ_by_a_share_and_end_together():
    split = Asynchronous(speed="uniform", spread=0.3)
    begins, ends = split._times(10, 4000, 10, np.random.default_rng(0))
    np.testing.assert_allclose(ends.max(axis=1), 10)
    lengths = ends - begins
    # Nine of ten groups of a client are within the spread, but for clients whose rest was too short; the tenth may be
    # any of them.
    outside = (lengths < 0.7 - 1e-9) | (lengths > 1.3 + 1e-9)
    few = outside.sum(axis=1) <= 1
    assert few.mean() > 0.9
    assert (outside[few].mean(axis=0) > 0.01).all()


def test_one_client_has_the_same_classes_and_the_same_share_in_all_groups():
    """FedSpace's code draws a client's classes and size once, and not in each task anew."""
    stream, shards = Asynchronous(order="same").deal(DATA, DirichletPowerLaw(0.5), STEPS, CLIENTS, 0)
    owner = np.full(len(DATA.train), -1)
    for own in shards:
        owner[own.indices] = np.repeat(np.arange(CLIENTS), own.sizes())
    labels = np.concatenate([stream.train_columns[own] for own in stream.train])
    whole = DirichletPowerLaw(0.5).assign(labels, CLIENTS, generator(0, "partition", 0))
    assert np.array_equal(owner[np.concatenate(stream.train)], whole)
    with pytest.raises(UserError, match=r"deals out all tasks at once.*split\.missing=0"):
        Asynchronous(missing=0.5).deal(DATA, DirichletPowerLaw(0.5), STEPS, CLIENTS, 0)
    with pytest.raises(UserError, match=r"split\.spread=1 with split\.speed=uniform"):
        Asynchronous(speed="uniform", spread=1)


def test_missing_groups_go_to_other_clients():
    found = arrivals(Asynchronous(missing=1.0, order="same"))
    holders = [[k for k, own in enumerate(found) if (own[:, 1] == g).any()] for g in range(6)]
    assert all(len(those) == 1 for those in holders)
    some = arrivals(Asynchronous(missing=0.5, order="same"))
    pairs = sum(len(np.unique(own[:, 1])) for own in some)
    assert 6 < pairs < 30
    assert sum(map(len, some)) == len(DATA.train)


def test_the_draws_have_a_seed_of_their_own():
    own = Asynchronous(order_seed=4, speed="lognormal")
    assert same(dealt(own, seed=0, clients=1)[0], dealt(own, seed=1, clients=1)[0])
    assert not same(dealt(Asynchronous(), seed=0)[0], dealt(Asynchronous(), seed=1)[0])


def test_a_file_says_who_has_what_when(tmp_path):
    data, path = dataset_of([5, 5, 7, 7, 9], [5, 7, 9, 9, 11]), tmp_path / "steps.csv"
    path.write_text("step,sample,client\n1,0,1\n0,1,0\n0,2,1\n1,3,1\n")
    split = Asynchronous(file=str(path))
    stream, shards = split.deal(data, Iid(), 2, 2, 0)
    assert [[own[k].tolist() for k in range(2)] for own in shards] == [[[1], [2]], [[], [0, 3]]]
    check_stream(stream, data)
    assert [task.columns for task in stream.tasks] == [(0, 1), (0, 1)]
    assert not stream.in_step
    # Classes without a sample in the file are not learnt, and not tested.
    assert sorted(np.concatenate(stream.test).tolist()) == [0, 1]
    before = _identity(split)
    path.write_text("step,sample,client\n1,0,1\n0,1,1\n")
    assert before["file"] != _identity(split)["file"]
    assert "file" not in _identity(Asynchronous())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("sample,client\n0,0\n", "step"),
        ("sample,client,step\n0,0,0\n0,1,1\n", "a sample twice"),
        ("sample,client,step\n0,0.5,0\n1,1,1\n", "cannot be read"),
        ("sample,client,step\n0,a,0\n", "cannot be read"),
        ("sample,client,step\n0,,0\n", "cannot be read"),
        ("sample,client,step\n99999999999999999999999,1,1\n", "cannot be read"),
        ("sample,client,step\n-1,0,0\n", "out of range"),
        ("sample,client,step\n9999,0,0\n", "out of range"),
        ("sample,client,step\n0,5,0\n", "out of range"),
        ("sample,client,step\n0,0,6\n", "out of range"),
        ("sample,client,step\n", "has no training sample"),
        ("", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(content, words, tmp_path):
    path = tmp_path / "steps.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        dealt(Asynchronous(file=str(path)))
    assert "\n" not in str(caught.value)


def test_more_groups_than_classes_are_refused():
    with pytest.raises(UserError, match=r"split\.groups=13 is more than the 12 classes"):
        dealt(Asynchronous(groups=13))
