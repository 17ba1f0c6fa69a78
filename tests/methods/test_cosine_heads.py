"""Heads that score by angles: scores, gradients, and what does not matter."""

from __future__ import annotations

import numpy as np
import torch

from fcl_bench.methods.averaging.first_stage import CosineHead, CosineNetwork
from fcl_bench.training.network import Network, feature_start


def test_the_scores_are_cosines_times_a_factor():
    """By hand: (3, 4) is at 0.6 to (2, 0), at 1 to (6, 8), at -0.8 to (0, -1); the factor begins at 1."""
    head = CosineHead(torch.tensor([[2.0, 0], [6, 8], [0, -1]]))
    torch.testing.assert_close(head(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.6, 1.0, -0.8]]))
    head.scale.data.fill_(10)
    torch.testing.assert_close(head(torch.tensor([[3.0, 4.0]])), torch.tensor([[6.0, 10.0, -8.0]]))


def test_scores_and_gradients_are_the_formulas():
    """s_c = eta z'w_c / (|z| |w_c|); ds_c/dw_c = eta (z/|z| - cos w_c/|w_c|) / |w_c|; ds_c/deta = cos."""
    rng = np.random.default_rng(0)
    z, w, g, eta = rng.standard_normal((30, 5)), rng.standard_normal((4, 5)), rng.standard_normal((30, 4)), 2.5
    head = CosineHead(torch.from_numpy(w)).double()
    head.scale.data.fill_(eta)
    scores = head(torch.from_numpy(z))
    scores.backward(torch.from_numpy(g))
    units, lengths = z / np.linalg.norm(z, axis=1, keepdims=True), np.linalg.norm(w, axis=1)
    cosines = units @ (w / lengths[:, None]).T
    np.testing.assert_allclose(scores.detach().numpy(), eta * cosines, rtol=1e-12)
    along = np.einsum("nc,nc->c", g, cosines)[:, None] * w / lengths[:, None]
    np.testing.assert_allclose(head.weight.grad.numpy(), eta * (g.T @ units - along) / lengths[:, None], rtol=1e-10)
    np.testing.assert_allclose(head.scale.grad.numpy(), [(g * cosines).sum()], rtol=1e-10)


def test_lengths_do_not_matter():
    head = CosineHead(torch.randn(3, 6, generator=torch.Generator().manual_seed(0)))
    features = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    before = head(features)
    head.weight.data *= torch.tensor([[0.1], [7.0], [100.0]])
    torch.testing.assert_close(head(3 * features), before)


def test_features_without_length_have_scores_and_gradients_of_zero():
    """A ReLU may leave no feature at all."""
    head, features = CosineHead(torch.ones(2, 3)), torch.zeros(4, 3)
    scores = head(features)
    scores.sum().backward()
    assert not scores.any()
    assert not head.weight.grad.any()


def test_new_weights_are_a_linear_heads():
    cosine, linear = CosineNetwork(feature_start(6)), Network(feature_start(6))
    for made in (cosine, linear):
        made.grow([5], seed=3)
    assert [name for name, _ in cosine.named_parameters()] == ["heads.0.weight", "heads.0.scale"]
    assert torch.equal(cosine.heads[0].weight, linear.heads[0].weight)
    assert cosine.heads[0].scale.tolist() == [1.0]
