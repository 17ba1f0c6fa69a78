"""FedProTIP's Dirichlet partition: every client holds every class of its task."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.data.partitions.dirichlet import DirichletAllClasses, _rounded
from fcl_bench.errors import UserError
from tests.data.partition_cases import counts, same_mean, uneven_labels


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(
    labels=uneven_labels(),
    clients=st.integers(1, 70),
    beta=st.floats(0, 1e308, exclude_min=True) | st.floats(1e-3, 10),
    seed=st.integers(0, 2**32),
)
def test_every_client_holds_every_class_or_the_error_says_what_would_work(labels, clients, beta, seed):
    smallest = int(np.unique(labels, return_counts=True)[1].min())
    if smallest < clients:
        with pytest.raises(UserError, match=rf"clients={smallest} at most"):
            DirichletAllClasses(beta).holdings(labels, clients, np.random.default_rng(seed))
        clients = smallest
    parts = DirichletAllClasses(beta).holdings(labels, clients, np.random.default_rng(seed))
    assert len(parts) == clients
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert all(set(labels[part]) == set(labels) for part in parts)
    again = DirichletAllClasses(beta).holdings(labels, clients, np.random.default_rng(seed))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32), clients=st.integers(1, 40), sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5)
)
def test_shares_are_rounded_down_or_up(seed, clients, sizes):
    rng, sizes = np.random.default_rng(seed), np.array(sizes)
    shares = rng.dirichlet(np.full(clients, 0.3), len(sizes))
    table = _rounded(shares, sizes, rng)
    exact = shares * sizes[:, None]
    np.testing.assert_array_equal(table.sum(axis=1), sizes)
    assert (table >= np.floor(exact - 1e-9)).all()
    assert (table <= np.ceil(exact + 1e-9)).all()


def test_rounding_is_right_in_the_mean():
    shares, sizes = np.array([[0.05, 0.62, 0.33]]), np.array([10])
    mean = np.mean([_rounded(shares, sizes, np.random.default_rng(seed)) for seed in range(4000)], axis=0)
    np.testing.assert_allclose(mean, shares * 10, atol=0.03)


@pytest.mark.slow
def test_shares_have_the_law_of_the_distribution():
    """Where hardly an assignment comes out empty, each client's share is Beta(beta, (K - 1) beta)."""
    labels = np.zeros(2000, dtype=int)
    shares = np.stack(
        [
            np.bincount(DirichletAllClasses(0.5).assign(labels, 4, rng), minlength=4)
            for rng in map(np.random.default_rng, range(2500))
        ]
    ) / len(labels)
    np.testing.assert_allclose(shares.mean(axis=0), 0.25, atol=0.02)
    np.testing.assert_allclose(shares.var(axis=0), 0.25 * 0.75 / 3, atol=0.006)  # mean (1 - mean) / (K beta + 1)


@pytest.mark.slow
def test_no_client_is_better_off_by_its_number():
    labels = np.repeat([0, 1, 2], [30, 40, 50])
    tables = np.stack(
        [
            counts(labels, DirichletAllClasses(0.2).assign(labels, 6, rng), 6)
            for rng in map(np.random.default_rng, range(1500))
        ]
    )
    for statistic in (
        tables,
        tables**2,
        tables == 1,
        tables.max(axis=1, keepdims=True) / tables.sum(axis=1, keepdims=True),
    ):
        for client in range(1, 6):
            assert same_mean(statistic[:, :, 0], statistic[:, :, client]).all()


def test_a_vanishing_beta_leaves_one_client_all_but_one_sample_of_each_other():
    labels = np.repeat([0, 1, 2, 3], 50)
    for beta in (1e-300, 1e-6):
        table = counts(labels, DirichletAllClasses(beta).assign(labels, 5, np.random.default_rng(0)), 5)
        np.testing.assert_array_equal(np.sort(table, axis=1), [[1, 1, 1, 1, 46]] * 4)


def test_a_large_beta_shares_every_class_evenly():
    table = counts(
        labels := np.repeat([0, 1], [50, 33]), DirichletAllClasses(1e9).assign(labels, 5, np.random.default_rng(0)), 5
    )
    assert np.ptp(table, axis=1).max() <= 1


def test_too_few_samples_of_a_class_is_an_error_in_one_line():
    with pytest.raises(UserError) as caught:
        DirichletAllClasses(0.5).holdings(np.repeat([4, 9], [30, 3]), 5, np.random.default_rng(0))
    assert str(caught.value) == (
        "partition=dirichlet_all_classes gives each of clients=5 a sample of every class, and the smallest class of a"
        " task has 3 (clients=3 at most, or partition=dirichlet)"
    )
