"""The regression mean of linear layers: against stacked least squares, and where the inputs do not span everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.linalg.regression_mean import damped, merged_weights, weighted


def drawn(seed: int, sizes: list[int], inputs: int = 5, outputs: int = 3) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Inputs X_k (n_k, i), of means and scales of their own, and weights W_k (o, i)."""
    rng = np.random.default_rng(seed)
    X = [rng.normal(rng.normal(), 1 + k, (n, inputs)) for k, n in enumerate(sizes)]
    return X, [rng.normal(size=(outputs, inputs)) for _ in sizes]


def sums(X: list[np.ndarray], W: list[np.ndarray], alpha: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    grams = [damped(torch.from_numpy(x.T @ x), alpha) for x in X]
    return sum(weighted(torch.from_numpy(w), G) for w, G in zip(W, grams, strict=True)), sum(grams)


def least_squares(X: list[np.ndarray], W: list[np.ndarray]) -> np.ndarray:
    """The W (o, i) of smallest norm that comes closest to all X_k W_k'."""
    targets = np.concatenate([x @ w.T for x, w in zip(X, W, strict=True)])
    return np.linalg.lstsq(np.concatenate(X), targets, rcond=None)[0].T


@pytest.mark.parametrize("sizes", [[9, 4, 7], [2, 1], [1]])
def test_it_is_least_squares_on_all_inputs(sizes):
    X, W = drawn(0, sizes)
    np.testing.assert_allclose(merged_weights(*sums(X, W)), least_squares(X, W), atol=1e-8, rtol=0)


def test_where_there_is_no_input_it_is_what_was_near():
    X, W = drawn(1, [2, 1])
    near = np.random.default_rng(2).normal(size=W[0].shape)
    range_ = np.linalg.qr(np.concatenate(X).T)[0]
    expected = least_squares(X, W) + near @ (np.eye(5) - range_ @ range_.T)
    np.testing.assert_allclose(merged_weights(*sums(X, W), torch.from_numpy(near)), expected, atol=1e-8, rtol=0)
    same = [near, near]
    assert np.abs(merged_weights(*sums(X, same), torch.from_numpy(near)).numpy() - near).max() < 1e-12


def test_a_diagonal_weighs_every_column_apart():
    X, W = drawn(3, [6, 8])
    X[0][:, 2] = X[1][:, 2] = 0
    X[1][:, 4] = 0
    weights = [np.square(x).sum(axis=0) for x in X]
    total = weights[0] + weights[1]
    total[2] = 1
    expected = (W[0] * weights[0] + W[1] * weights[1]) / total
    diagonals = [torch.from_numpy(weight) for weight in weights]
    S = sum(weighted(torch.from_numpy(w), G) for w, G in zip(W, diagonals, strict=True))
    found = merged_weights(S, sum(diagonals))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert (found[:, 2] == 0).all()
    near = torch.ones(3, 5, dtype=torch.float64)
    kept = merged_weights(S, sum(diagonals), near)
    assert (kept[:, 2] == 1).all()
    others = [0, 1, 3, 4]
    np.testing.assert_allclose(kept[:, others], expected[:, others], rtol=1e-12)
    np.testing.assert_allclose(merged_weights(*sums(X, W, alpha=0.0)), found, atol=1e-12)


def test_damping_leaves_the_diagonal():
    G = torch.tensor([[4.0, 2.0], [2.0, 3.0]])
    assert torch.equal(damped(G, 0.25), torch.tensor([[4.0, 0.5], [0.5, 3.0]]))
    assert damped(G, 1.0) is G
    assert torch.equal(damped(G, 0.0), torch.diag(torch.tensor([4.0, 3.0])))
    assert torch.equal(damped(G.diagonal(), 0.25), G.diagonal())


def test_what_rounding_made_is_no_input():
    """Gram matrices of 3 samples in 5 dimensions, rounded to float32: the weights stay in the size of the clients'."""
    X, W = drawn(4, [2, 1])
    rounded = [torch.from_numpy(x.T @ x).float() for x in X]
    S = sum(weighted(torch.from_numpy(w), G) for w, G in zip(W, rounded, strict=True))
    found = merged_weights(S, sum(G.double() for G in rounded), rounding=torch.finfo(torch.float32).eps)
    np.testing.assert_allclose(found, least_squares(X, W), atol=1e-4)
