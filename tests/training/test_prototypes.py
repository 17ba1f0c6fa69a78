"""Prototypes in the place of class weights: distances, gradients, and the linear scores that name the same class."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.methods.transformers.pilora import PrototypeNetwork, Prototypes
from fcl_bench.training.network import feature_start


def test_the_scores_are_negative_distances():
    """By hand in d = 4: from (1, 1, 1, 1) to 0 it is 1, to (3, 1, 1, 1) it is 1, to (1, 1, 1, 7) it is 3."""
    head = Prototypes(torch.tensor([[0.0] * 4, [3.0, 1, 1, 1], [1.0, 1, 1, 7]]))
    torch.testing.assert_close(head(torch.ones(1, 4)), torch.tensor([[-1.0, -1.0, -3.0]]))
    rng = np.random.default_rng(0)
    z, w = rng.standard_normal((30, 5)), rng.standard_normal((40, 5))
    expected = -np.sqrt(((z[:, None] - w) ** 2).sum(axis=2) / 5)
    ours = Prototypes(torch.from_numpy(w))(torch.from_numpy(z)).detach().numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-12)


def test_far_away_distances_do_not_cancel():
    """The expanded square ||z||^2 - 2 z.w + ||w||^2 would lose the difference of 0.01 beside features of 1000."""
    head = Prototypes(torch.full((30, 3), 1000.0))
    distances = -head(torch.full((30, 3), 1000.01)).detach()
    torch.testing.assert_close(distances, torch.full((30, 30), 0.01), rtol=1e-2, atol=0)


def test_a_sample_on_its_prototype_has_a_gradient_of_zero():
    head = Prototypes(torch.ones(2, 3))
    features = torch.ones(4, 3, requires_grad=True)
    head(features).sum().backward()
    assert not features.grad.any()
    assert not head.weight.grad.any()


def test_scores_keep_float32_under_half_precision():
    head = Prototypes(torch.zeros(2, 3))
    assert head(torch.ones(4, 3, dtype=torch.bfloat16)).dtype == torch.float32


def network(sizes: list[int], seed: int = 3) -> PrototypeNetwork:
    made = PrototypeNetwork(feature_start(6))
    made.grow(sizes, seed)
    return made


def test_new_prototypes_follow_from_the_seed_and_are_small():
    ours, again, other = network([500, 2]), network([500, 2]), network([500, 2], seed=4)
    weights = ours.heads[0].weight.detach()
    assert [name for name, _ in ours.named_parameters()] == ["heads.0.weight", "heads.1.weight"]
    assert torch.equal(weights, again.heads[0].weight)
    assert not torch.equal(weights, other.heads[0].weight)
    assert not torch.equal(weights[:2], ours.heads[1].weight)
    assert float(weights.std()) == pytest.approx(0.1, rel=0.05)
    assert abs(float(weights.mean())) < 0.01


def test_the_linear_classifier_names_the_nearest_prototype():
    ours, features = network([3, 0, 4]), torch.randn(50, 6, generator=torch.Generator().manual_seed(0)) * 0.1
    scores = ours.logits(features)
    assert scores.shape == (50, 7)
    weight, bias = ours.classifier()
    assert (weight.shape, bias.shape) == ((7, 6), (7,))
    assert torch.equal((features @ weight.T + bias).argmax(dim=1), scores.argmax(dim=1))
    assert len(set(scores.argmax(dim=1).tolist())) > 2
