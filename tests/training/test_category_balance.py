"""LGA's weights of samples: by hand, against the plain oracle, and their limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.methods.exemplars.glfc import magnitudes
from fcl_bench.methods.exemplars.lga import GROUPS, balanced_weights, tempered
from tests.methods import lga_oracle


def weighed(g, y, first, learnt, task, groups) -> list[float]:
    known = torch.zeros(len(first), dtype=torch.bool)
    known[list(learnt)] = True
    g = torch.tensor(g, dtype=torch.float64)
    return balanced_weights(g, torch.tensor(y), torch.tensor(first), known, task, groups).tolist()


def logits_of(g: list[float]) -> torch.Tensor:
    """(b, 2) with |sigma(q)[0] - 1| = g."""
    q = torch.tensor(g, dtype=torch.float64)
    return torch.stack([torch.log((1 - q) / q), torch.full_like(q, 3.0)], dim=1)


@pytest.mark.parametrize(
    ("task", "g", "expected"), [(0, 0.25, 0.25), (1, 0.25, 0.5), (2, 0.125, 0.25), (3, 0.0625, 0.125), (1, 0.81, 0.9)]
)
def test_the_exponent_by_hand(task, g, expected):
    """t / (t + 1): none in the first task, 1/2 in the second, 2/3 in the third, 3/4 in the fourth."""
    found = tempered(magnitudes(logits_of([g]), torch.tensor([0])), task)
    assert found.item() == pytest.approx(expected, rel=1e-12)


FIRST = [0, 0, 1, 1, 2, 2]
HAND = [0.2, 0.6, 0.4, 0.8, 0.4], [0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    ("groups", "expected"), [("separate", [0.5, 1.5, 1.0, 4 / 3, 2 / 3]), ("cumulative", [1.0, 3.0, 1.0, 4 / 3, 2 / 3])]
)
def test_two_earlier_tasks_by_hand(groups, expected):
    """Means .4 of the first task, .4 of the second, .4 of both, .6 of the new classes."""
    assert weighed(*HAND, FIRST, {0, 1, 2, 3}, 2, groups) == pytest.approx(expected, rel=1e-12)


def test_erratum_cumulative_groups_count_an_earlier_task_once_for_each_task_since():
    """With equal magnitudes the fourth task weighs its forerunners 3, 2 and 1 times, its own classes once."""
    first, y = [0, 1, 2, 3], [0, 1, 2, 3]
    assert weighed([0.3] * 4, y, first, {0, 1, 2}, 3, "cumulative") == pytest.approx([3, 2, 1, 1])
    assert weighed([0.3] * 4, y, first, {0, 1, 2}, 3, "separate") == pytest.approx([1, 1, 1, 1])
    # Six tasks on, the first one runs into the limit.
    assert weighed([0.3] * 7, range(7), range(7), range(6), 6, "cumulative") == pytest.approx([5, 5, 4, 3, 2, 1, 1])


def test_weights_are_cut_to_their_limits():
    g = [0.9, 0.01, 0.9] + [0.001] * 9
    y = [0, 0, 1] + [1] * 9
    found = weighed(g, y, [0, 1], {0}, 1, "separate")
    assert found[:3] == pytest.approx([0.9 / 0.455, 0.5, 5.0])
    assert set(found[3:]) == {0.5}


def test_without_learnt_classes_all_weigh_1():
    for groups in GROUPS:
        assert weighed([0.9, 0.1, 0.01], [0, 2, 2], [0, 0, 1], set(), 1, groups) == [1.0, 1.0, 1.0]


def test_an_old_class_that_the_client_has_not_learnt_is_new():
    """Class 1 first came in task 0, where this client did not have it."""
    assert weighed([0.2, 0.3, 0.5], [0, 1, 2], [0, 0, 1], {0}, 1, "separate") == pytest.approx([1, 0.75, 1.25])


def test_a_group_that_has_nothing_left_to_learn_is_cut_rather_than_not_a_number():
    assert weighed([0.0, 0.0, 0.2], [0, 0, 1], [0, 1], {0}, 1, "separate") == [0.5, 0.5, 1.0]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", range(12))
def test_the_plain_oracle(seed, groups):
    """Random streams, learnt classes and logits; some groups are without a sample."""
    rng = np.random.default_rng(seed)
    task = int(rng.integers(1, 6))
    sizes = rng.integers(1, 4, task + 1)
    first = np.repeat(np.arange(task + 1), sizes)
    learnt = {int(c) for c in np.flatnonzero(first < task) if rng.random() < 0.7}
    q, y = 3 * rng.standard_normal((8, len(first))), rng.integers(0, len(first), 8)
    g = tempered(magnitudes(torch.from_numpy(q), torch.from_numpy(y)), task)
    plain = lga_oracle.magnitudes(q, y.tolist(), task)
    np.testing.assert_allclose(g.numpy(), plain, rtol=1e-12)
    found = weighed(g.tolist(), y.tolist(), first.tolist(), learnt, task, groups)
    expected = lga_oracle.weights(plain, y.tolist(), first.tolist(), learnt, task, groups)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert all(0.5 <= w <= 5 for w in found)


def test_weights_bear_no_gradient():
    scores = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 2])
    learnt = torch.tensor([True, False, False])
    g = tempered(magnitudes(scores, labels), 1)
    assert not balanced_weights(g, labels, torch.tensor([0, 0, 1]), learnt, 1, "cumulative").requires_grad
