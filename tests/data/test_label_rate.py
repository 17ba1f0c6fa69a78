"""Which labels are kept."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fcl_bench.data.partitions.base import draw_labelled


@given(
    labels=st.lists(st.integers(0, 6), max_size=120),
    rate=st.floats(0.01, 1, exclude_min=True),
    seed=st.integers(0, 1000),
)
def test_the_rate_is_met_and_every_class_has_its_share(labels, rate, seed):
    labels = np.array(labels, dtype=np.int64)
    kept = draw_labelled(labels, rate, np.random.default_rng(seed))
    assert kept.dtype == bool
    assert abs(kept.sum() - rate * len(labels)) <= 0.5 + 1e-6
    for label in np.unique(labels):
        members = labels == label
        share = rate * members.sum()
        assert np.floor(share - 1e-6) <= kept[members].sum() <= np.ceil(share + 1e-6)


def test_all_labels_are_kept_at_rate_1_and_one_draw_is_one_draw():
    labels = np.random.default_rng(0).integers(0, 5, 200)
    assert draw_labelled(labels, 1.0, np.random.default_rng(0)).all()
    first, again, other = (draw_labelled(labels, 0.3, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_which_sample_of_a_class_and_which_class_gets_the_odd_label_is_random():
    """Ten classes of one sample at rate 0.5: five labels, and every class has an even chance."""
    draws = [draw_labelled(np.arange(10), 0.5, np.random.default_rng(seed)) for seed in range(2000)]
    assert {int(kept.sum()) for kept in draws} == {5}
    assert np.abs(np.mean(draws, axis=0) - 0.5).max() < 0.06


def test_a_client_with_few_samples_may_keep_none():
    assert not draw_labelled(np.array([3, 3]), 0.2, np.random.default_rng(0)).any()
    assert draw_labelled(np.array([], dtype=int), 0.5, np.random.default_rng(0)).shape == (0,)
