"""What holds of every split: cover, determinism, its own seed, agreement with the plain re-statement of its text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fcl_bench.config import _identity
from fcl_bench.data.partitions.base import Iid, Shards
from fcl_bench.data.partitions.dirichlet import Dirichlet, DirichletAllClasses, DirichletEqualSizes
from fcl_bench.data.partitions.power_law import DirichletPowerLaw
from fcl_bench.data.splits.base import SampleSplit
from fcl_bench.data.splits.class_incremental import ClassIncremental, ClassOverlap
from fcl_bench.data.splits.domain_incremental import DomainIncremental
from fcl_bench.data.splits.si_blurry import SiBlurry
from fcl_bench.errors import UserError
from fcl_bench.randomness import generator
from fcl_bench.typed import typed_instance
from tests.data import split_oracle
from tests.data.split_cases import check_cover, check_stream, dataset_of, same, uneven_dataset

SPLITS = {
    "class_incremental": ClassIncremental(),
    "class_incremental_first": ClassIncremental(first=3),
    "class_overlap": ClassOverlap(),
    "class_overlap_two": ClassOverlap(shared=2),
    "si_blurry": SiBlurry(),
    "si_blurry_equal": SiBlurry(sizes="equal"),
    "si_blurry_any": SiBlurry(disjoint=0.3, blurry=0.6, reassign="any"),
    "si_blurry_equal_any": SiBlurry(disjoint=0.2, blurry=0.5, sizes="equal", reassign="any"),
}


def many_classes():
    """12 classes in 6 domains, 20 training and 5 test samples of each pair of the two."""
    sides = [(np.repeat(np.arange(12), 6 * size), np.tile(np.arange(6), 12 * size)) for size in (20, 5)]
    return dataset_of(*(labels for labels, _ in sides), [domains for _, domains in sides], tuple("abcdef"))


def plain(split: SampleSplit, dataset, tasks: int, seed: int) -> split_oracle.Tasks:
    if isinstance(split, ClassIncremental):
        return split_oracle.class_incremental(dataset, tasks, seed, split.first, split.shuffle)
    if isinstance(split, ClassOverlap):
        return split_oracle.class_overlap(dataset, tasks, seed, split.shared)
    assert isinstance(split, SiBlurry)
    knobs = (split.disjoint, split.blurry, split.sizes, split.reassign)
    return split_oracle.si_blurry(dataset, tasks, seed, *knobs)


def tasks_of(members: tuple[np.ndarray, ...], total: int) -> list[int | None]:
    answer: list[int | None] = [None] * total
    for task, indices in enumerate(members):
        for sample in indices.tolist():
            answer[sample] = task
    return answer


@pytest.mark.parametrize("name", SPLITS)
# Splits with an overlap refuse most of these small data sets.
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=uneven_dataset(), tasks=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_a_split_covers_the_data_and_is_what_its_text_says(name, data, tasks, seed):
    try:
        stream = SPLITS[name].cut(data, tasks, seed)
    except UserError:
        assume(False)
    check_stream(stream, data)
    check_cover(stream, data)
    assert same(stream, SPLITS[name].cut(data, tasks, seed))
    train, test = plain(SPLITS[name], data, tasks, seed)
    assert tasks_of(stream.train, len(data.train)) == train
    assert tasks_of(stream.test, len(data.test)) == test


@pytest.mark.parametrize("name", SPLITS)
def test_the_split_has_a_seed_of_its_own(name):
    data, split = many_classes(), SPLITS[name]
    own = type(split)(**{**vars(split), "order_seed": 7})
    assert same(own.cut(data, 3, 0), own.cut(data, 3, 1))
    assert same(own.cut(data, 3, 0), split.cut(data, 3, 7))
    assert not same(split.cut(data, 3, 0), split.cut(data, 3, 1))


def test_all_splits_by_class_take_the_classes_in_one_order():
    """So that methods meet the same classes first, whatever the split."""
    data = many_classes()
    orders = [split.cut(data, 1, 5).class_order.tolist() for split in SPLITS.values() if "first" not in str(split)]
    assert all(order == orders[0] for order in orders)


@pytest.mark.parametrize("name", SPLITS)
def test_an_own_seed_is_part_of_the_run_id(name):
    split = SPLITS[name]
    assert _identity(split)["order_seed"] is None
    assert _identity(type(split)(**{**vars(split), "order_seed": 0}))["order_seed"] == 0


def test_the_identity_names_the_split_and_its_knobs():
    knobs = {"first": None, "shuffle": True, "imbalance": 1.0, "order_seed": None}
    assert _identity(ClassIncremental()) == {"choice": "class_incremental", **knobs}


def test_class_incremental_draws_what_it_always_drew():
    order = ClassIncremental().cut(dataset_of(range(10), range(10)), 5, 0).class_order
    np.testing.assert_array_equal(order, generator(0, "class order").permutation(10))
    assert order.tolist() == [6, 9, 3, 0, 8, 7, 4, 2, 5, 1]


def test_a_seed_without_anything_to_draw_is_refused():
    for split, knobs in ((ClassIncremental, {"shuffle": False}), (DomainIncremental, {})):
        with pytest.raises(UserError, match=r"split\.order_seed=3 has nothing to draw"):
            split(**knobs, order_seed=3)
        with pytest.raises(UserError, match=r"split\.order_seed=-1 is out of range"):
            typed_instance(split, {"order_seed": -1}, "split")


@pytest.mark.slow
def test_splits_and_partitions_do_not_depend_on_the_number_of_threads():
    """Every split under every partition, one after the other and by eight threads at once."""
    data = many_classes()
    rules = [
        Iid(),
        Shards(),
        Dirichlet(0.5, min_size=0),
        DirichletAllClasses(0.5),
        DirichletEqualSizes(0.5),
        DirichletPowerLaw(0.5),
    ]

    def deal(case: tuple[SampleSplit, int, int]) -> list[np.ndarray]:
        split, rule, seed = case
        stream = split.cut(data, 3, seed)
        return [
            members[part]
            for t, members in enumerate(stream.train)
            for part in rules[rule].holdings(stream.train_columns[members], 2, generator(seed, "partition", t))
        ]

    # Classes of two samples and more at every task; blurry classes can be scarcer, which `DirichletAllClasses` refuses.
    cases = [
        (split, rule, seed)
        for split in SPLITS.values()
        for rule in range(len(rules))
        for seed in range(2)
        if not (isinstance(split, SiBlurry) and rule == 3)
    ]
    alone = [deal(case) for case in cases]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(deal, cases * 2))
    for first, second in zip(alone * 2, together, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
