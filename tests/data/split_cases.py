"""What tests of splits share: data sets of any shape, and what must hold of every stream."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from fcl_bench.data.sources.base import Dataset, Split
from fcl_bench.data.splits.base import Stream


def dataset_of(train, test, domains=None, names: tuple[str, ...] = ()) -> Dataset:
    """A data set with these labels and, of (train, test), these domains."""
    sides = [np.asarray(side, dtype=np.int64) for side in (train, test)]
    of_domain = [None, None] if domains is None else [np.asarray(side, dtype=np.int64) for side in domains]
    splits = [
        Split(labels, np.zeros((len(labels), 2)), "x", domain) for labels, domain in zip(sides, of_domain, strict=True)
    ]
    return Dataset("made", *splits, domain_names=names)


@st.composite
def uneven_dataset(draw: st.DrawFn, classes: int = 12, most: int = 30) -> Dataset:
    """Up to `classes` classes with gaps between the labels, 1 to `most` training and 0 to 9 test samples each."""
    sizes = draw(st.lists(st.tuples(st.integers(1, most), st.integers(0, 9)), min_size=1, max_size=classes))
    names, rng = 3 * np.arange(len(sizes)) + 2, np.random.default_rng(draw(st.integers(0, 2**32)))
    train, test = (rng.permutation(np.repeat(names, [size[side] for size in sizes])) for side in (0, 1))
    return dataset_of(train, test if len(test) else names[:1])


def even_dataset(classes: int, train: int, test: int) -> Dataset:
    return dataset_of(np.tile(np.arange(classes), train), np.tile(np.arange(classes), test))


def check_stream(stream: Stream, dataset: Dataset) -> None:
    """Each sample in one task at most, and what a task says of its classes is what its samples are."""
    for members, labels, columns in (
        (stream.train, dataset.train.labels, stream.train_columns),
        (stream.test, dataset.test.labels, stream.test_columns),
    ):
        together = np.concatenate(members)
        assert len(np.unique(together)) == len(together)
        assert all((np.diff(indices) > 0).all() for indices in members)
        for label, column in zip(labels.tolist(), columns.tolist(), strict=True):
            assert column == (stream.class_order.tolist().index(label) if label in stream.class_order else -1)
    seen: list[int] = []
    for task, members in zip(stream.tasks, stream.train, strict=True):
        here = sorted({int(column) for column in stream.train_columns[members]})
        assert list(task.columns) == here
        assert list(task.new_columns) == [column for column in here if column not in seen]
        seen += list(task.new_columns)
        assert seen == list(range(task.columns_seen))
    assert len(seen) == len(stream.class_order)


def check_cover(stream: Stream, dataset: Dataset) -> None:
    """Every training sample is in a task, and so is every test sample whose class is trained."""
    np.testing.assert_array_equal(np.sort(np.concatenate(stream.train)), np.arange(len(dataset.train)))
    np.testing.assert_array_equal(np.sort(np.concatenate(stream.test)), np.flatnonzero(stream.test_columns >= 0))


def class_table(stream: Stream, side: str = "train") -> np.ndarray:
    """(T, C): samples of each column in each task."""
    columns = getattr(stream, f"{side}_columns")
    return np.stack(
        [np.bincount(columns[members], minlength=len(stream.class_order)) for members in getattr(stream, side)]
    )


def same(first: Stream, second: Stream) -> bool:
    pairs = zip(
        (first.class_order, *first.train, *first.test), (second.class_order, *second.train, *second.test), strict=True
    )
    return first.tasks == second.tasks and all(np.array_equal(a, b) for a, b in pairs)
