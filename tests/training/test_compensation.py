"""GLFC's loss against plain loops in float64: its weights, its targets, its gradient, and the entropy of the signal."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fcl_bench.methods.exemplars.glfc import Compensated, entropy, group_weights, magnitudes
from fcl_bench.training.network import Heads
from tests.methods import glfc_oracle as plain

HEADS = Heads(((0, 1, 2), (3, 4)), (3, 4))


def drawn(seed: int):
    """Logits (9, 5), labels, and an old model's logits (9, 3)."""
    rng = np.random.default_rng(seed)
    return 2 * rng.standard_normal((9, 5)), rng.integers(0, 5, 9), 2 * rng.standard_normal((9, 3))


def flags(learnt, columns: int = 5) -> torch.Tensor:
    return torch.tensor([column in learnt for column in range(columns)])


def ours(q, y, learnt, old):
    """The loss, and its gradient in the logits."""
    scores = torch.from_numpy(q).requires_grad_()
    teacher = None if old is None else lambda _: torch.from_numpy(old)
    objective = Compensated(HEADS, False, flags(learnt), teacher)
    loss = objective.score_loss(scores, torch.from_numpy(y), torch.zeros(len(q)))
    loss.backward()
    return loss.item(), scores.grad.numpy()


# Weights --------------------------------------------------------------------------------------------------------------


def test_weights_by_hand():
    """sigma(q)[y] = .9, .6, .5 in the groups old, old, new: g = .1, .4, .5, and w = .4, 1.6, 1."""
    q = torch.logit(torch.tensor([[0.9, 0.3], [0.6, 0.2], [0.1, 0.5]], dtype=torch.float64))
    g = magnitudes(q, torch.tensor([0, 0, 1]))
    torch.testing.assert_close(g, torch.tensor([0.1, 0.4, 0.5], dtype=torch.float64))
    w = group_weights(g, torch.tensor([True, True, False]))
    torch.testing.assert_close(w, torch.tensor([0.4, 1.6, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("learnt", [{0, 1}, {0, 1, 2}, {4}, {0, 1, 2, 3, 4}], ids=str)
def test_the_mean_weight_of_each_group_is_1(seed, learnt):
    q, y, _ = drawn(seed)
    old = np.isin(y, list(learnt))
    w = group_weights(magnitudes(torch.from_numpy(q), torch.from_numpy(y)), torch.from_numpy(old)).numpy()
    np.testing.assert_allclose(w, plain.weights(q, y, learnt), rtol=1e-12)
    for group in (old, ~old):
        if group.any():
            assert w[group].mean() == pytest.approx(1, abs=1e-12)


def test_where_nothing_is_learnt_every_weight_is_1():
    q, y, _ = drawn(0)
    objective = Compensated(HEADS, False, flags(()), None)
    assert objective.weights(torch.from_numpy(q), torch.from_numpy(y)) is None
    loss, _ = ours(q, y, (), None)
    mean = torch.nn.functional.binary_cross_entropy_with_logits(torch.from_numpy(q), torch.eye(5)[y].double())
    assert loss == pytest.approx(mean.item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_that_are_learnt_to_the_last_bit_make_nothing_infinite(dtype):
    """In float32 1 - sigma(40) is 0, and sigma(-40) 4e-18; beyond 104 both are, and a group's mean may be 0."""
    q = torch.tensor([[40.0, -1], [41, -1], [1000, -1], [1000, -1], [-1, 1000]], dtype=dtype)
    labels, old = torch.tensor([0, 0, 0, 0, 1]), torch.tensor([True, True, False, False, False])
    w = group_weights(magnitudes(q, labels), old)
    assert w[:2].mean() == pytest.approx(1)
    assert w[0] / w[1] == pytest.approx(math.e, rel=1e-5)
    assert w[2:].tolist() == [0, 0, 0]
    scores = q.requires_grad_()
    loss = Compensated(Heads(((0,), (1,)), (1,)), False, torch.tensor([True, False]), None).score_loss(
        scores, labels, q
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(scores.grad).all()


# The loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learnt", [(), {0, 1}, {0, 1, 2}, {0, 3}], ids=str)
@pytest.mark.parametrize("taught", [False, True])
def test_the_loss_and_its_gradient_are_the_equations(learnt, taught):
    q, y, old = drawn(4)
    old = old if taught else None
    loss, slope = ours(q, y, learnt, old)
    assert loss == pytest.approx(plain.loss(q, y, learnt, old), rel=1e-12)
    np.testing.assert_allclose(slope, plain.gradient(q, y, learnt, old), atol=1e-15)


def test_the_oracles_gradient_is_that_of_its_loss():
    """By central differences, with the weights held, through which nothing flows."""
    q, y, old = drawn(5)
    w = plain.weights(q, y, {0, 1})
    found = np.zeros_like(q)

    def held(q):
        hard = np.eye(5)[y]
        soft = hard.copy()
        soft[:, :3] = plain.sigma(old)
        return 0.5 * (w[:, None] * plain.bce(q, hard)).mean() + 0.5 * plain.bce(q, soft).mean()

    for place in np.ndindex(*q.shape):
        step = np.zeros_like(q)
        step[place] = 1e-6
        found[place] = (held(q + step) - held(q - step)) / 2e-6
    np.testing.assert_allclose(found, plain.gradient(q, y, {0, 1}, old), atol=1e-9)


def test_new_columns_are_learnt_from_labels_and_old_ones_from_the_old_model(monkeypatch):
    q, y, old = drawn(6)
    targets = []
    original = torch.nn.functional.binary_cross_entropy_with_logits

    def noted(scores, target, **options):
        targets.append(target.numpy())
        return original(scores, target, **options)

    monkeypatch.setattr("fcl_bench.methods.exemplars.glfc.binary_cross_entropy_with_logits", noted)
    ours(q, y, {0}, old)
    hard, soft = targets
    np.testing.assert_array_equal(hard, np.eye(5)[y])
    np.testing.assert_array_equal(soft[:, 3:], np.eye(5)[y][:, 3:])
    np.testing.assert_allclose(soft[:, :3], plain.sigma(old), rtol=1e-12)


def test_half_of_each_by_hand():
    """q = (0, 0), y the second, learnt nothing, q' = 0 for the first: BCE is log 2 everywhere, with either target."""
    loss, _ = ours(np.zeros((1, 5)), np.array([4]), (), np.zeros((1, 3)))
    assert loss == pytest.approx(math.log(2), rel=1e-12)
    # With q' = 2 log 3 in three of five columns of L_old: sigma = .9, and BCE at q = 0 is log 2 still.
    assert ours(np.zeros((1, 5)), np.array([4]), (), np.full((1, 3), 2 * math.log(3)))[0] == pytest.approx(math.log(2))
    # q = (log 3, 0, 0, 0, 0) and q' = 0: L_cur = (log 4 + 4 log 2) / 5, L_old = (log 4 - .5 log 3 + 4 log 2) / 5.
    q = np.zeros((1, 5))
    q[0, 0] = math.log(3)
    by_hand = (math.log(4) + 4 * math.log(2) - 0.25 * math.log(3)) / 5
    assert ours(q, np.array([4]), (), np.zeros((1, 3)))[0] == pytest.approx(by_hand, rel=1e-12)


# The entropy of the signal --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "fires"), [(1, False), (2, False), (3, False), (4, True), (10, True), (100, True)])
def test_uniform_predictions_of_three_classes_at_most_can_not_make_a_signal(columns, fires):
    """log 3 = 1.0986 < 1.2 < log 4 = 1.3863; the logarithm's 1e-5 changes the fifth digit."""
    found = float(entropy(torch.zeros(7, columns)))
    assert found == pytest.approx(math.log(columns), abs=1e-3)
    assert (found > 1.2) == fires
    if columns == 10:
        assert found == pytest.approx(-math.log(0.1 + 1e-5), rel=1e-12)
        assert found == pytest.approx(2.3025, abs=2e-4)


def test_the_entropy_is_the_equation():
    q, *_ = drawn(7)
    p = np.exp(q) / np.exp(q).sum(axis=1, keepdims=True)
    assert float(entropy(torch.from_numpy(q))) == pytest.approx(-(p * np.log(p + 1e-5)).sum(axis=1).mean(), rel=1e-12)
