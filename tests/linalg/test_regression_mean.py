"""The regression mean of linear layers: against stacked least squares, and where the inputs do not span everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.methods.transformers.regmean import RegressionSums, damped, merged_weights, weighted


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


def merged(S: torch.Tensor, G: torch.Tensor, near: torch.Tensor | None = None, rounding: float = 0.0) -> torch.Tensor:
    """`merged_weights`, by default 0 where there is no input."""
    return merged_weights(S, G, torch.zeros_like(S) if near is None else near, rounding)


@pytest.mark.parametrize("sizes", [[9, 4, 7], [2, 1], [1]])
def test_it_is_least_squares_on_all_inputs(sizes):
    X, W = drawn(0, sizes)
    np.testing.assert_allclose(merged(*sums(X, W)), least_squares(X, W), atol=1e-8, rtol=0)


def test_where_there_is_no_input_it_is_what_was_near():
    X, W = drawn(1, [2, 1])
    near = np.random.default_rng(2).normal(size=W[0].shape)
    range_ = np.linalg.qr(np.concatenate(X).T)[0]
    expected = least_squares(X, W) + near @ (np.eye(5) - range_ @ range_.T)
    np.testing.assert_allclose(merged(*sums(X, W), torch.from_numpy(near)), expected, atol=1e-8, rtol=0)
    same = [near, near]
    assert np.abs(merged(*sums(X, same), torch.from_numpy(near)).numpy() - near).max() < 1e-12


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
    found = merged(S, sum(diagonals))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert (found[:, 2] == 0).all()
    near = torch.ones(3, 5, dtype=torch.float64)
    kept = merged(S, sum(diagonals), near)
    assert (kept[:, 2] == 1).all()
    others = [0, 1, 3, 4]
    np.testing.assert_allclose(kept[:, others], expected[:, others], rtol=1e-12)
    np.testing.assert_allclose(merged(*sums(X, W, alpha=0.0)), found, atol=1e-12)


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
    found = merged(S, sum(G.double() for G in rounded), rounding=torch.finfo(torch.float32).eps)
    np.testing.assert_allclose(found, least_squares(X, W), atol=1e-4)


# What LoRM asks of it: updates B_k A_k whose one factor everyone has --------------------------------------------------


def merged_B(X: list[np.ndarray], B: list[np.ndarray], A: np.ndarray) -> np.ndarray:
    """B by the Gram matrices of its own inputs, A x."""
    found = RegressionSums()
    for x, own in zip(X, B, strict=True):
        found.add({"gram": torch.from_numpy(A @ x.T @ x @ A.T)}, {"B": torch.from_numpy(own)}, {"B": "gram"})
    return merged(found.products["B"], found.grams["gram"]).numpy()


def factors(seed: int, clients: int, rank: int = 2) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(3, rank)) for _ in range(clients)], rng.normal(size=(rank, 5))


def test_the_merge_of_B_is_the_papers_formula_and_least_squares():
    X, _ = drawn(5, [9, 4, 7])
    B, A = factors(5, 3)
    G = [x.T @ x for x in X]
    formula = sum(b @ A @ g for b, g in zip(B, G, strict=True)) @ A.T @ np.linalg.pinv(A @ sum(G) @ A.T)
    targets = np.concatenate([x @ (b @ A).T for x, b in zip(X, B, strict=True)])
    solved = np.linalg.lstsq(np.concatenate(X) @ A.T, targets, rcond=None)[0].T
    np.testing.assert_allclose(merged_B(X, B, A), formula, atol=1e-8)
    np.testing.assert_allclose(merged_B(X, B, A), solved, atol=1e-8)


def test_one_client_or_equal_ones_keep_their_B():
    X, _ = drawn(6, [9, 4, 7])
    B, A = factors(6, 3)
    np.testing.assert_allclose(merged_B(X[:1], B[:1], A), B[0], atol=1e-10)
    np.testing.assert_allclose(merged_B(X, [B[0]] * 3, A), B[0], atol=1e-10)
    assert np.abs(merged_B(X, B, A) - B[0]).max() > 0.1


def test_a_client_in_two_parts_is_the_client():
    X, _ = drawn(7, [9, 6])
    B, A = factors(7, 2)
    split = merged_B([X[0][:4], X[0][4:], X[1]], [B[0], B[0], B[1]], A)
    np.testing.assert_allclose(split, merged_B(X, B, A), atol=1e-10)


def test_the_merge_of_A_does_not_depend_on_B():
    """min_A sum_k ||B (A - A_k) X_k'||^2, solved in all entries of A at once."""
    X, A = drawn(8, [9, 4])
    B = np.random.default_rng(8).normal(size=(4, 3))
    # vec by rows of B A x' is (B kron x) vec(A).
    rows = np.concatenate([np.kron(B, x) for x in X])
    targets = np.concatenate([(B @ a @ x.T).ravel() for x, a in zip(X, A, strict=True)])
    solved = np.linalg.lstsq(rows, targets, rcond=None)[0].reshape(3, 5)
    np.testing.assert_allclose(merged(*sums(X, A)), solved, atol=1e-8)


def test_after_one_task_the_merged_update_is_its_own_where_it_had_inputs():
    X, _ = drawn(9, [3])
    B, A = factors(9, 1)
    delta, range_ = B[0] @ A, np.linalg.qr(X[0].T)[0]
    found = merged(*sums(X, [delta])).numpy()
    np.testing.assert_allclose(found @ range_, delta @ range_, atol=1e-10)
    assert np.abs(found - delta).max() > 0.01
    X, _ = drawn(9, [20])
    np.testing.assert_allclose(merged(*sums(X, [delta])), delta, atol=1e-10)


def test_a_layer_without_rows_is_merged_too():
    """The head of a task without a new class."""
    G = torch.eye(4, dtype=torch.float64)
    assert merged(torch.zeros(0, 4), G, torch.zeros(0, 4)).shape == (0, 4)


def test_sums_do_not_see_what_the_wire_made_of_symmetry():
    G = torch.tensor([[2.0, 1.0], [0.5, 3.0]])
    found = RegressionSums()
    found.add({"gram": G}, {"W": torch.eye(2)}, {"W": "gram"})
    assert torch.equal(found.grams["gram"], torch.tensor([[2.0, 0.75], [0.75, 3.0]], dtype=torch.float64))
    assert torch.equal(found.products["W"], found.grams["gram"])
    found.clear()
    assert not found.grams
    assert not found.products
