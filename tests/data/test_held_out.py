"""The cut of a data set that has no test set: a fifth of each class, by the images' hashes alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.data.sources.imagenet_r import held_out

#: Labels and hashes; few distinct hashes, so that equal images occur.
SAMPLES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30).map(lambda n: f"{n:04x}")), min_size=1, max_size=60)


def oracle(samples: list[tuple[int, str]]) -> list[bool]:
    """The rule word by word: image after image, class by class."""
    test: set[tuple[int, str]] = set()
    for label in {label for label, _ in samples}:
        mine = [digest for other, digest in samples if other == label]
        wanted = max(1, int(len(mine) / 5 + 0.5))
        for digest in sorted(set(mine)):
            if sum((label, each) in test for each in mine) < wanted:
                test.add((label, digest))
    return [sample in test for sample in samples]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(samples=SAMPLES)
def test_the_cut_is_the_rule_in_words(samples):
    labels, digests = np.array([label for label, _ in samples]), [digest for _, digest in samples]
    assert held_out(labels, digests).tolist() == oracle(samples)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(samples=SAMPLES, seed=st.integers(0, 9))
def test_neither_order_nor_other_classes_matter(samples, seed):
    labels, digests = np.array([label for label, _ in samples]), [digest for _, digest in samples]
    whole = held_out(labels, digests)
    order = np.random.default_rng(seed).permutation(len(samples))
    np.testing.assert_array_equal(held_out(labels[order], [digests[i] for i in order]), whole[order])
    mine = labels == labels[0]
    alone = held_out(labels[mine], [digest for digest, keep in zip(digests, mine, strict=True) if keep])
    np.testing.assert_array_equal(alone, whole[mine])


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 200))
def test_distinct_images_are_cut_to_the_nearest_fifth(count):
    test = held_out(np.zeros(count, dtype=int), [f"{number * 7919 % 10007:05d}" for number in range(count)])
    assert test.sum() == max(1, round(count / 5))
