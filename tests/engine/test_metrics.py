"""Metrics against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.engine.metrics import accuracy_matrix, metrics

#: Three tasks with 10, 20 and 10 test samples.
TESTS = np.array([10, 20, 10])
CORRECT = np.array([[8, 0, 0], [6, 15, 0], [7, 10, 9]])
# a = [[80, -, -], [60, 75, -], [70, 50, 90]]


def test_metrics_are_those_of_the_papers():
    found = metrics(CORRECT, TESTS)
    pooled = [80, 100 * 21 / 30, 100 * 26 / 40]
    assert found["accuracy"] == pytest.approx(pooled)
    assert found["A_avg"] == pytest.approx(np.mean(pooled))
    assert found["A_T"] == pytest.approx(65)
    by_task = [80, 67.5, 70]
    assert found["A_avg_tasks"] == pytest.approx(np.mean(by_task))
    assert found["A_T_tasks"] == pytest.approx(70)
    # max over t < T of a[t, tau] minus a[T, tau]: 80 - 70 and 75 - 50
    assert found["forgetting"] == pytest.approx((10 + 25) / 2)
    assert found["forgetting_fedprotip"] == pytest.approx((10 + 25) / 3)
    assert found["retention"] == pytest.approx(100 * (70 / 80 + 50 / 75 + 90 / 90) / 3)
    assert found["stability"] == pytest.approx((60 + (70 + 50) / 2) / 2)
    assert found["plasticity"] == pytest.approx((80 + 75 + 90) / 3)


def test_every_task_has_its_own_stability_plasticity_and_retention():
    """AFCL's tables F.4: S_t over the tasks before t, P_t of t itself, R_t over all up to t."""
    found = metrics(CORRECT, TESTS)
    assert found["stability_by_task"] == [None, 60, (70 + 50) / 2]
    assert found["plasticity_by_task"] == [80, 75, 90]
    ratios = [1, (60 / 80 + 1) / 2, (70 / 80 + 50 / 75 + 1) / 3]
    assert found["retention_by_task"] == pytest.approx([100 * ratio for ratio in ratios])
    # The mean accuracy from the two: A_t = ((t - 1) S_t + P_t) / t.
    assert found["A_T_tasks"] == pytest.approx((2 * 60 + 90) / 3)


def test_a_task_without_test_samples_is_in_no_series():
    """The others are as if it were not there."""
    correct, tests = np.insert(np.insert(CORRECT, 1, 0, axis=0), 1, 0, axis=1), np.insert(TESTS, 1, 0)
    without, found = metrics(CORRECT, TESTS), metrics(correct, tests)
    for name in ("stability_by_task", "plasticity_by_task", "retention_by_task"):
        assert found[name][1] is None
        assert [found[name][t] for t in (0, 2, 3)] == without[name]
    assert [found[name] for name in ("stability", "plasticity")] == [without["stability"], without["plasticity"]]


def test_a_task_never_learnt_leaves_no_retention_from_then_on():
    found = metrics(np.array([[4, 0, 0], [4, 0, 0], [3, 2, 5]]), np.array([5, 5, 5]))
    assert found["retention_by_task"] == [100, None, None]
    assert found["stability_by_task"] == [None, 80, 50]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.integers(0, 10**6))
def test_means_of_the_series_are_the_metrics_over_the_stream(tasks, seed):
    rng = np.random.default_rng(seed)
    tests = rng.integers(1, 30, tasks)
    correct = np.tril(rng.integers(1, tests + 1, (tasks, tasks)))
    found = metrics(correct, tests)
    stability, plasticity = found["stability_by_task"], found["plasticity_by_task"]
    assert found["plasticity"] == pytest.approx(np.mean(plasticity))
    assert found["stability"] == (pytest.approx(np.mean(stability[1:])) if tasks > 1 else None)
    assert found["retention"] == found["retention_by_task"][-1]
    a = accuracy_matrix(correct, tests)
    for t in range(1, tasks):
        assert t * stability[t] + plasticity[t] == pytest.approx(np.nansum(a[t]))


def test_the_matrix_is_empty_above_the_diagonal():
    a = accuracy_matrix(CORRECT, TESTS)
    assert a[2, 1] == 50
    assert np.isnan(a[np.triu_indices(3, 1)]).all()


def test_forgetting_can_be_negative():
    assert metrics(np.array([[5, 0], [9, 4]]), np.array([10, 10]))["forgetting"] == pytest.approx(-40)


def test_one_task_leaves_forgetting_and_stability_undefined():
    found = metrics(np.array([[3]]), np.array([4]))
    assert (found["A_T"], found["A_avg"], found["plasticity"], found["retention"]) == (75, 75, 75, 100)
    assert found["forgetting"] is found["forgetting_fedprotip"] is found["stability"] is None
    assert (found["stability_by_task"], found["plasticity_by_task"]) == ([None], [75])


def test_a_task_never_learnt_leaves_retention_undefined_not_infinite():
    found = metrics(np.array([[0, 0], [1, 4]]), np.array([5, 5]))
    assert found["retention"] is None
    assert all(value is None or isinstance(value, list) or math.isfinite(value) for value in found.values())
