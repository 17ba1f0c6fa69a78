"""Every partition is a set of disjoint index arrays that cover the task exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.data.partitions import dirichlet
from fcl_bench.data.partitions.base import Iid, Shards
from fcl_bench.data.partitions.dirichlet import Dirichlet, DirichletEqualSizes
from fcl_bench.data.partitions.power_law import DirichletPowerLaw
from fcl_bench.errors import UserError

RULES = [
    *(lambda beta: Dirichlet(beta, min_size=0), DirichletEqualSizes, DirichletPowerLaw),
    *(lambda _: Iid(), lambda _: Shards(shards=1), lambda _: Shards(shards=3)),
]


def labels_of(samples: int, classes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, samples)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    rule=st.sampled_from(RULES),
    samples=st.integers(1, 3000),
    classes=st.integers(1, 200),
    clients=st.integers(1, 1000),
    beta=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**32),
)
def test_partitions_are_disjoint_covers_and_repeatable(rule, samples, classes, clients, beta, seed):
    labels = labels_of(samples, classes, seed)
    parts = rule(beta).holdings(labels, clients, np.random.default_rng(seed))
    assert len(parts) == clients
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(samples))
    assert all((np.diff(part) > 0).all() for part in parts)
    again = rule(beta).holdings(labels, clients, np.random.default_rng(seed))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(10, 2000),
    classes=st.integers(1, 30),
    clients=st.integers(1, 50),
    beta=st.floats(1e-3, 100),
    seed=st.integers(0, 2**32),
)
def test_the_dirichlet_cap_stops_full_clients(samples, classes, clients, beta, seed):
    """Classes are dealt in ascending order, so before its last class a client held less than n / K."""
    labels = labels_of(samples, classes, seed)
    for part in Dirichlet(beta, min_size=0).holdings(labels, clients, np.random.default_rng(seed)):
        if len(part):
            assert (labels[part] < labels[part].max()).sum() < samples / clients


@settings(max_examples=40, deadline=None)
@given(clients=st.integers(1, 8), beta=st.floats(0.05, 10), min_size=st.integers(0, 30), seed=st.integers(0, 2**32))
def test_dirichlet_meets_min_size_or_says_so(clients, beta, min_size, seed):
    labels = labels_of(200, 5, seed)
    rule = Dirichlet(beta, min_size=min_size)
    told = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dirichlet, "_DRAWS", 20)
        try:
            smallest = min(map(len, rule.holdings(labels, clients, np.random.default_rng(seed))))
        except UserError as error:
            told = str(error)
    assert f"partition.min_size={min_size}" in told if told else smallest >= min_size


def test_an_impossible_min_size_is_an_error_not_an_endless_loop():
    rng = np.random.default_rng(0)
    with pytest.raises(UserError, match=r"min_size=5 for clients=50.*min_size=2 at most"):
        Dirichlet(0.1, min_size=5).holdings(labels_of(100, 4, 0), 50, rng)
    with pytest.raises(UserError, match="not met in 1000 draws"):
        Dirichlet(0.01, min_size=19).holdings(labels_of(100, 1, 0), 5, rng)


def test_smaller_beta_is_more_skewed():
    """Mean largest class share of a client, over many draws."""
    labels = np.repeat(np.arange(10), 100)

    def skew(beta: float) -> float:
        shares = []
        for seed in range(20):
            for part in Dirichlet(beta).holdings(labels, 5, np.random.default_rng(seed)):
                shares.append(np.bincount(labels[part]).max() / len(part))
        return float(np.mean(shares))

    assert skew(0.1) > skew(0.5) > skew(10) > 0.1
    assert skew(1e4) < 0.12


def test_dirichlet_shares_have_the_law_of_the_distribution():
    """Without the cap's effect (one class), the first client's share is Beta(beta, (K - 1) beta)."""
    labels = np.zeros(2000, dtype=int)
    shares = [
        len(Dirichlet(0.5, min_size=0).holdings(labels, 4, np.random.default_rng(s))[0]) / 2000 for s in range(800)
    ]
    assert np.mean(shares) == pytest.approx(0.25, abs=0.03)
    assert np.var(shares) == pytest.approx(0.25 * 0.75 / 3, abs=0.012)  # mean (1 - mean) / (K beta + 1)


@settings(max_examples=40, deadline=None)
@given(samples=st.integers(1, 500), clients=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_iid_sizes_differ_by_one_at_most(samples, clients, seed):
    sizes = [len(p) for p in Iid().holdings(labels_of(samples, 3, seed), clients, np.random.default_rng(seed))]
    assert max(sizes) - min(sizes) <= 1


def test_a_shard_client_sees_few_classes():
    """With pieces that divide the classes evenly, s shards hold at most s classes."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(20), 50))
    for shards in (2, 4, 10):
        for part in Shards(shards=shards).holdings(labels, 10, np.random.default_rng(shards)):
            assert len(np.unique(labels[part])) <= shards
            assert len(part) == 100
