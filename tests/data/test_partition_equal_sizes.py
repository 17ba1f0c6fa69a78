"""AFCL's Dirichlet partition: clients of equal size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.data.partitions.dirichlet import DirichletEqualSizes
from tests.data.partition_cases import counts, same_mean, uneven_labels


def tables(labels: np.ndarray, clients: int, beta: float, draws: int) -> np.ndarray:
    """(draws, C, K) samples of each class at each client."""
    rule = DirichletEqualSizes(beta)
    return np.stack(
        [counts(labels, rule.assign(labels, clients, np.random.default_rng(s)), clients) for s in range(draws)]
    )


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(
    labels=uneven_labels(),
    clients=st.integers(1, 70),
    beta=st.floats(0, 1e308, exclude_min=True) | st.floats(1e-3, 10),
    seed=st.integers(0, 2**32),
)
def test_sizes_differ_by_one_at_most_and_every_sample_is_dealt_once(labels, clients, beta, seed):
    parts = DirichletEqualSizes(beta).holdings(labels, clients, np.random.default_rng(seed))
    assert len(parts) == clients
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    again = DirichletEqualSizes(beta).holdings(labels, clients, np.random.default_rng(seed))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_a_client_turns_to_its_next_class_only_when_the_one_before_is_gone():
    """Two clients of 100 samples, two classes of 100, preferences that rank: each client gets its first class whole, or
    both have the same one and share it at random, and then the other one."""
    drawn = tables(np.repeat([3, 8], 100), 2, 1e-9, 400)
    whole = (drawn == 0).any(axis=(1, 2))
    assert np.isin(drawn[whole], [0, 100]).all()
    assert np.mean(whole) == pytest.approx(0.5, abs=0.1)
    first = drawn[~whole][:, 0, 0]
    # Hypergeometric: 100 of 200 places are served, 100 places are the client's.
    assert first.mean() == pytest.approx(50, abs=1)
    assert first.var() == pytest.approx(100 * 0.25 * 100 / 199, rel=0.35)


@pytest.mark.slow
def test_no_client_gets_what_the_others_left():
    """Over seeds all clients have the same distribution, the last as the first, however scarce the classes are."""
    labels = np.repeat(np.arange(6), [2, 10, 20, 40, 60, 70])
    drawn = tables(labels, 6, 0.1, 1500)
    held = (drawn > 0).sum(axis=1)
    largest = drawn.max(axis=1) / drawn.sum(axis=1)
    for client in range(1, 6):
        for statistic in (held, largest):
            assert same_mean(statistic[:, 0], statistic[:, client])
        assert same_mean(drawn[:, :, 0], drawn[:, :, client]).all()
        assert same_mean(drawn[:, :, 0] ** 2, drawn[:, :, client] ** 2).all()
    # Sizes that cannot be equal are no privilege of the first clients either.
    sizes = np.stack(
        [
            np.bincount(DirichletEqualSizes(0.1).assign(labels, 5, np.random.default_rng(s)), minlength=5)
            for s in range(900)
        ]
    )
    assert set(sizes.ravel()) == {40, 41}
    np.testing.assert_allclose(sizes.mean(axis=0), 202 / 5, atol=0.08)


@pytest.mark.slow
def test_no_class_is_preferred_by_its_number():
    drawn = tables(np.repeat(np.arange(5), 40), 4, 0.2, 1500)
    for label in range(1, 5):
        assert same_mean((drawn[:, 0] > 0), (drawn[:, label] > 0)).all()
        assert same_mean(drawn[:, 0] ** 2, drawn[:, label] ** 2).all()


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_class_counts_have_the_law_of_the_distribution_where_few_places_draw_again(beta):
    """Of m samples the counts are Dirichlet-multinomial: variance m (1 / C) (1 - 1 / C) (m + C beta) / (1 + C beta)."""
    classes, m = 4, 30
    # With many small clients the demand for a class is its supply up to a few percent: few places draw again.
    drawn = tables(np.repeat(np.arange(classes), 400 * m // classes), 400, beta, 20)
    share = drawn.transpose(0, 2, 1).reshape(-1, classes)
    expected = m / classes * (1 - 1 / classes) * (m + classes * beta) / (1 + classes * beta)
    np.testing.assert_allclose(share.var(axis=0).mean(), expected, rtol=0.12)


def test_smaller_beta_is_more_skewed_and_a_large_one_is_iid():
    labels = np.repeat(np.arange(10), 100)

    def skew(beta: float) -> float:
        drawn = tables(labels, 5, beta, 30)
        return float((drawn.max(axis=1) / drawn.sum(axis=1)).mean())

    assert skew(0.01) > skew(0.1) > skew(0.5) > skew(10) > skew(1e6)
    # Hypergeometric counts, as of a random subset: mean 20, variance 20 (1 - 1/10) (1 - 1/5).
    even = tables(labels, 5, 1e12, 200)
    np.testing.assert_allclose(even.mean(), 20)
    assert even.var() == pytest.approx(20 * 0.9 * 0.8, rel=0.15)


def test_fewer_samples_than_clients_leave_clients_empty():
    rule = DirichletEqualSizes(0.1)
    sizes = [len(part) for part in rule.holdings(np.array([2, 2, 7]), 5, np.random.default_rng(0))]
    assert sorted(sizes) == [0, 0, 1, 1, 1]
    assert [len(part) for part in rule.holdings(np.array([], dtype=int), 2, np.random.default_rng(0))] == [0, 0]
