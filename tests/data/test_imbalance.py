"""`split.imbalance`: which samples stay, for every split, and what of a run follows them."""

from __future__ import annotations

import hashlib
import logging

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fcl_bench.data.sources.base import Dataset
from fcl_bench.data.splits import base
from fcl_bench.data.splits.base import Division, SampleSplit, Stream
from fcl_bench.data.splits.class_incremental import ClassIncremental
from fcl_bench.data.splits.domain_incremental import DomainIncremental
from fcl_bench.errors import UserError
from fcl_bench.execution.plan import deal
from fcl_bench.randomness import generator
from fcl_bench.typed import typed_instance
from tests.data.split_cases import check_stream, class_table, dataset_of, even_dataset, same, uneven_dataset
from tests.data.test_stream_splits import SPLITS, many_classes
from tests.small_runs import run_in, settings_for

#: Digests of streams of `many_classes()` in 3 tasks with seed 5, made before there was `imbalance`.
BEFORE = {
    "class_incremental": "7fbd3a8a8b21",
    "class_incremental_first": "4a31e22de15b",
    "class_overlap": "1b9277e92c9f",
    "class_overlap_two": "2a906d5360da",
    "si_blurry": "f599deb7d148",
    "si_blurry_equal": "e276facd60a1",
    "si_blurry_any": "084ae30da61e",
    "si_blurry_equal_any": "063fbb167367",
}


def digest(stream: Stream) -> str:
    found = hashlib.blake2b(digest_size=6)
    for array in (stream.class_order, stream.train_columns, stream.test_columns, *stream.train, *stream.test):
        found.update(np.asarray(array, dtype=np.int64).tobytes() + b"|")
    found.update(repr(stream.tasks).encode())
    return found.hexdigest()


def imbalanced(split: SampleSplit, imbalance: float, **knobs) -> SampleSplit:
    return type(split)(**{**vars(split), "imbalance": imbalance, **knobs})


def staying(data: Dataset, balanced: Stream, imbalance: float, seed: int) -> set[int]:
    """The samples that stay, class by class, from the documented draws."""
    rng = generator(seed, "class imbalance")
    there = np.concatenate(balanced.train).tolist()
    labels = data.train.labels.tolist()
    classes = sorted({labels[i] for i in there})
    order = rng.permutation(len(classes)).tolist()
    keys = rng.random(len(labels)).tolist()
    stay: set[int] = set()
    for i, number in enumerate(order):
        members = sorted((m for m in there if labels[m] == classes[number]), key=lambda m: keys[m])
        share = imbalance ** (i / (len(classes) - 1)) if len(classes) > 1 else 1.0
        stay |= set(members[: max(1, round(share * len(members)))])
    return stay


@pytest.mark.parametrize("name", SPLITS)
@settings(max_examples=12, deadline=None)
@given(
    data=uneven_dataset(),
    tasks=st.integers(1, 6),
    seed=st.integers(0, 2**32),
    imbalance=st.sampled_from([0.9, 0.3, 0.1, 0.01]),
)
def test_each_class_keeps_its_share_and_tests_are_untouched(name, data, tasks, seed, imbalance):
    try:
        balanced = SPLITS[name].cut(data, tasks, seed)
        stream = imbalanced(SPLITS[name], imbalance).cut(data, tasks, seed)
    except UserError:
        assume(False)
    check_stream(stream, data)
    stay = staying(data, balanced, imbalance, seed)
    for all_of_it, kept in zip(balanced.train, stream.train, strict=True):
        assert kept.tolist() == [sample for sample in all_of_it.tolist() if sample in stay]
    assert all(np.array_equal(a, b) for a, b in zip(balanced.test, stream.test, strict=True))
    assert sorted(stream.class_order) == sorted(balanced.class_order)
    assert stream.unseen_tests == balanced.unseen_tests
    assert stream.class_samples.tolist() == class_table(stream).sum(axis=0).tolist()


def test_the_shares_are_geometric_from_all_to_the_given_one():
    """11 classes of 1000 samples at a hundredth: 1000 / 10^(i/5), whatever the tasks are."""
    data = even_dataset(11, 1000, 2)
    for tasks in (1, 4):
        counts = ClassIncremental(imbalance=0.01).cut(data, tasks, 3).class_samples
        assert sorted(counts, reverse=True) == [1000, 631, 398, 251, 158, 100, 63, 40, 25, 16, 10]


@pytest.mark.parametrize("name", SPLITS)
def test_without_imbalance_nothing_is_drawn_and_streams_are_as_they_were(name, monkeypatch):
    monkeypatch.setattr(base, "thinned", None)
    assert digest(SPLITS[name].cut(many_classes(), 3, 5)) == BEFORE[name]
    assert digest(imbalanced(SPLITS[name], 1).cut(many_classes(), 3, 5)) == BEFORE[name]


def test_the_draws_are_the_splits_own():
    """The seed of the split, an order independent of that of the classes, the same samples whatever the tasks."""
    data = even_dataset(10, 50, 2)
    split = ClassIncremental(imbalance=0.1)
    own = ClassIncremental(imbalance=0.1, order_seed=7)
    assert same(own.cut(data, 5, 0), own.cut(data, 5, 1))
    assert same(own.cut(data, 5, 0), split.cut(data, 5, 7))
    assert not same(split.cut(data, 5, 0), split.cut(data, 5, 1))
    samples = [
        set(np.concatenate(imbalanced(other, 0.1).cut(data, tasks, 0).train).tolist())
        for other in SPLITS.values()
        for tasks in ((1, 3) if other != SPLITS["class_incremental_first"] else (3,))
    ]
    assert all(found == samples[0] for found in samples)
    # Commonest in any place of the order of the classes.
    places = [int(split.cut(data, 5, seed).class_samples.argmax()) for seed in range(60)]
    assert len(set(places)) == 10


def test_only_samples_and_classes_of_the_stream_count():
    """A domain that is no task's has no part: the commonest class keeps all that it has in the others."""
    sides = [(np.tile([0, 1], 60), np.repeat([0, 1, 2], 40)), (np.tile([0, 1], 6), np.repeat([0, 1, 2], 4))]
    sides[0][0][80:] = 2  # a class of the third domain alone
    data = dataset_of(*(labels for labels, _ in sides), [domains for _, domains in sides], tuple("abc"))
    stream = DomainIncremental(imbalance=0.1).cut(data, 2, 0)
    assert sorted(stream.class_samples) == [4, 40]
    assert all((indices < 80).all() for indices in stream.train)


def test_one_class_and_one_sample_stay():
    assert ClassIncremental(imbalance=0.01).cut(dataset_of([4] * 9, [4]), 1, 0).class_samples.tolist() == [9]
    few = ClassIncremental(imbalance=0.01).cut(dataset_of(range(8), range(8)), 8, 0)
    assert few.class_samples.tolist() == [1] * 8


def test_impossible_shares_are_refused_and_a_seed_has_something_to_draw():
    for value in (0, -0.5, 1.5, float("nan")):
        with pytest.raises(UserError, match=r"split\.imbalance=.* is out of range \(?.*a share, above 0 to 1"):
            typed_instance(ClassIncremental, {"imbalance": value}, "split")
    data = even_dataset(6, 20, 1)
    streams = [ClassIncremental(shuffle=False, imbalance=0.2, order_seed=s).cut(data, 2, 0) for s in (0, 0, 1)]
    assert same(streams[0], streams[1])
    assert not same(streams[0], streams[2])


class TwoParts(SampleSplit):
    """A split from elsewhere: all samples but one in task 0."""

    name = "two_parts"

    def divide(self, dataset: Dataset, tasks: int, seed: int) -> Division:
        rest, one = np.arange(len(dataset.train) - 1), np.array([len(dataset.train) - 1])
        return Division(np.unique(dataset.train.labels), [rest, one], [np.arange(len(dataset.test)), one[:0]])


def test_a_split_from_elsewhere_has_it_too_and_a_task_that_it_empties_is_refused():
    data, refused = even_dataset(4, 50, 1), 0
    for seed in range(20):
        stays = 199 in np.concatenate(ClassIncremental(imbalance=0.02).cut(data, 1, seed).train)
        if stays:
            assert sorted(TwoParts(imbalance=0.02).cut(data, 2, seed).class_samples) == [1, 4, 14, 50]
            continue
        refused += 1
        with pytest.raises(UserError, match="task 1 has no training sample"):
            TwoParts(imbalance=0.02).cut(data, 2, seed)
    assert 0 < refused < 20


SMALL = ("data=digits", "split.imbalance=0.1", "tasks=3", "clients=4", "partition.min_size=0")


@pytest.mark.slow_cases("class_incremental", "si_blurry")
@pytest.mark.parametrize("split", ["class_incremental", "class_overlap", "si_blurry"])
def test_the_files_of_a_run_say_which_samples_went_where(split, tmp_path):
    overrides = (*SMALL, f"split={split}", "label_rate=0.5")
    dealt = deal(settings_for(tmp_path, *overrides))
    outcome = run_in(tmp_path, "method=stsa", "method.M=16", *overrides)
    parts, tasks = np.load(outcome.folder / "partition.npz"), pd.read_csv(outcome.folder / "tasks.csv")
    held = [[parts[f"train_t{t}_c{k}"] for k in range(4)] for t in range(3)]
    everything = np.concatenate([np.concatenate(clients) for clients in held])
    assert len(np.unique(everything)) == len(everything) < len(dealt.dataset.train) / 2
    for t, clients in enumerate(held):
        assert np.array_equal(np.sort(np.concatenate(clients)), dealt.stream.train[t])
    # Samples of nobody are in no array, the one of samples without label included.
    assert set(parts["unlabelled"]) <= set(everything)
    labels = dealt.dataset.train.labels[everything]
    counts = [int((labels == label).sum()) for label in parts["class_order"]]
    assert outcome.record["class_samples"] == counts
    assert tasks["train_samples"].tolist() == [len(np.concatenate(clients)) for clients in held]
    assert tasks["labelled"].sum() == len(everything) - len(parts["unlabelled"])
    assert sum(len(parts[f"test_t{t}"]) for t in range(3)) == len(dealt.dataset.test)


@pytest.mark.slow
def test_joint_learns_what_the_clients_hold(tmp_path):
    """The ceiling is that of the same stream."""
    weights = []
    for method in (("method=centralised_ridge", "method.ridge=100"), ("method=stsa", "method.gamma=100")):
        outcome = run_in(tmp_path, *method, "method.M=16", "wire.dtype=float64", *SMALL)
        weights.append((outcome.folder / "accuracy_matrix.csv").read_text())
        assert sum(outcome.record["class_samples"]) < 700
    assert weights[0] == weights[1]


def test_labels_of_samples_that_nobody_has_do_not_count(tmp_path, caplog):
    with pytest.raises(UserError, match="label_rate=0.001 leaves no label"):
        deal(settings_for(tmp_path, *SMALL, "label_rate=0.001"))
    with caplog.at_level(logging.WARNING):
        dealt = deal(settings_for(tmp_path, *SMALL, "label_rate=0.01"))
    held = np.concatenate([clients.indices for clients in dealt.shards])
    known = np.unique(dealt.dataset.train.labels[held[dealt.labelled[held]]])
    assert len(known) < 10
    assert f"label_rate=0.01 leaves {10 - len(known)} of 10 classes without a label" in caplog.text


@pytest.mark.slow
def test_the_preview_tells_the_range(command, tmp_path):
    code, out, _ = command(f"out={tmp_path}", "preview=true", *SMALL)
    assert code == 0
    assert "digits, class_incremental, imbalance 0.1: 3 tasks" in out
    stream = deal(settings_for(tmp_path, *SMALL)).stream
    rows = [line.strip("│ ").split("│") for line in out.splitlines() if line.startswith("│")]
    table = class_table(stream)
    assert [row[-1].strip() for row in rows] == [f"{c[c > 0].min()}-{c.max()}" for c in table]
    assert f"{sum(table.sum(axis=0))} of 1442 training samples, 355 of 355 test samples" in out
