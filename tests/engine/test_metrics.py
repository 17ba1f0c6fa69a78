"""Metrics against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

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


def test_a_task_never_learnt_leaves_retention_undefined_not_infinite():
    found = metrics(np.array([[0, 0], [1, 4]]), np.array([5, 5]))
    assert found["retention"] is None
    assert all(value is None or isinstance(value, list) or math.isfinite(value) for value in found.values())
