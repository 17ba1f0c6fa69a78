"""Softmax steps of the Gaussian sketch's server against a plain NumPy oracle, and their properties."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fcl_bench.methods.closed_form.algebra.random_features import OwnCovariances
from fcl_bench.methods.closed_form.algebra.softmax_steps import DrawnClasses, softmax_steps
from fcl_bench.methods.closed_form.gaussian_sketch import GaussianSketch, GaussianSketchServer
from fcl_bench.randomness import derived_seed
from tests.methods.harness import context_of, draw_tasks, learn, random_tasks, relative_error, stream_of

METHOD = GaussianSketch(M=25, rank=4, class_rank=3, ridge=1.0, softmax_steps=6)


def loss_and_gradient(W, samples):
    """The sums over weighted samples of -log softmax(W'h)[y] and of h (softmax(W'h) - e_y)', in float64."""
    loss, gradient = 0.0, np.zeros_like(W)
    for H, column, weight in samples:
        scores = H @ W
        scores = scores - scores.max(axis=1, keepdims=True)
        logarithms = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        loss -= weight * logarithms[:, column].sum()
        p = np.exp(logarithms)
        p[:, column] -= 1
        gradient += weight * H.T @ p
    return loss, gradient


def oracle_steps(W, A, draws):
    """The steps as the method's page has them; draws[k] holds the samples of step k. Also how often it went back."""
    sharper = min(2.0 ** np.arange(-10, 31), key=lambda factor: loss_and_gradient(factor * W, draws[0])[0])
    W = sharper * W
    length, back = 16.0, 0
    before, least, direction = W, np.inf, None
    for samples in draws[1:]:
        loss, gradient = loss_and_gradient(W, samples)
        if loss > least:
            length, back = length / 2, back + 1
        else:
            before, least, direction = W, loss, np.linalg.solve(A, gradient)
        W = before - length * direction
    return W, back


def samples_of(seed: int, classes: int, M: int, noise: float):
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(classes, M))
    return [(centres[c] + noise * rng.normal(size=(30, M)), c, 1.0 + c) for c in range(classes)]


@pytest.mark.parametrize(("M", "noise", "steps", "goes_back"), [(12, 0.5, 5, False), (6, 4.0, 7, True)])
def test_steps_agree_with_the_oracle(M, noise, steps, goes_back):
    draws = [samples_of(seed, classes=4, M=M, noise=noise) for seed in range(steps + 1)]
    A = np.eye(M) + sum(weight * H.T @ H for H, _, weight in draws[0])
    W = np.linalg.solve(A, np.random.default_rng(1).normal(size=(M, 4)))
    expected, back = oracle_steps(W, A, draws)
    assert (back > 0) == goes_back, "the case does not try what it is meant for"
    found = softmax_steps(
        torch.tensor(W),
        lambda gradient: torch.linalg.solve(torch.tensor(A), gradient),
        lambda step: [(torch.tensor(H), column, weight) for H, column, weight in draws[step]],
        steps=steps,
    )
    assert relative_error(found, expected) < 1e-9


@pytest.mark.parametrize("scale_scores", [False, True])
def test_the_server_steps_from_its_own_solution_and_statistics(scale_scores):
    method = dataclasses.replace(METHOD, scale_scores=scale_scores)
    tasks, context = draw_tasks(np.random.default_rng(3), 8, [3, 2], [[60, 40], [30, 70]]), context_of(8)
    server, _ = learn(method, context, tasks)
    plain, _ = learn(dataclasses.replace(method, softmax_steps=0), context, tasks)
    assert isinstance(server, GaussianSketchServer)
    G, B = server.gram().numpy(), server.B.numpy()
    A = G + np.eye(25)
    W = np.linalg.solve(A, B)
    scaled = W / np.sqrt((W * B).sum(axis=0)) if scale_scores else W
    assert relative_error(plain.model()["W"], scaled) < 1e-8
    P = server.random_features.projection
    assert P is not None
    draws = []
    for step in range(7):
        seed = derived_seed(context.seed, "softmax steps", B.shape[1], step)
        drawn = server.drawn.draw(server.scatter / server.samples, seed)
        draws.append([(np.maximum(Z.numpy() @ P.numpy(), 0), column, weight) for Z, column, weight in drawn])
    expected, _ = oracle_steps(scaled, A, draws)
    assert relative_error(server.model()["W"], expected) < 1e-8
    assert loss_and_gradient(expected, draws[-1])[0] < loss_and_gradient(scaled, draws[-1])[0]


def test_a_restored_server_ends_at_the_same_weights():
    tasks, context = random_tasks(4, 9), context_of(8)
    server, _ = learn(METHOD, context, tasks)
    again = METHOD.server(context)
    for task in stream_of(tasks):
        again.start_task(task)
    again.load_state_dict(server.state_dict())
    again.restored()
    torch.testing.assert_close(again.model()["W"], server.model()["W"], rtol=0, atol=0)


def test_draws_have_the_classes_mean_and_covariance():
    rng = np.random.default_rng(2)
    root, L = rng.normal(size=(4, 4)), rng.normal(size=(1, 4, 2))
    Sigma = torch.tensor(root @ root.T)
    classes = DrawnClasses(Sigma, 2)
    mean = torch.tensor(rng.normal(size=(4, 1)))
    classes.add(
        torch.tensor([3]), torch.tensor([500]), mean, OwnCovariances(torch.tensor([0.5]).double(), torch.tensor(L))
    )
    samples = torch.cat([Z for seed in range(60) for Z, column, _ in classes.draw(Sigma, seed) if column == 3])
    covariance = 0.5 * root @ root.T + L[0] @ L[0].T
    assert len(samples) == 30_000
    assert relative_error(samples.mean(dim=0), mean[:, 0].numpy()) < 0.05
    assert relative_error(torch.cov(samples.T), covariance) < 0.05


def test_a_lying_count_costs_no_more_samples_and_no_sample_is_of_an_empty_class():
    Sigma = torch.eye(3, dtype=torch.float64)
    classes = DrawnClasses(Sigma, 0)
    own = OwnCovariances(torch.ones(3).double(), torch.zeros(3, 3, 0).double())
    classes.add(torch.tensor([0, 1, 2]), torch.tensor([7, 0, 2**31 - 1]), torch.zeros(3, 3).double(), own)
    drawn = [(len(Z), column, weight * len(Z)) for Z, column, weight in classes.draw(Sigma, 0)]
    assert drawn == [(7, 0, 7.0), (500, 2, pytest.approx(2**31 - 1))]


def test_a_class_that_comes_back_has_an_entry_for_each_task():
    tasks = draw_tasks(np.random.default_rng(5), 8, [2, 2], [[20, 10], [12, 9]])
    (Z, labels), *others = tasks[1]
    labels = labels.copy()
    labels[:4] = 1
    tasks = [tasks[0], [(Z, labels), *others]]
    server, _ = learn(METHOD, context_of(8), tasks)
    assert isinstance(server, GaussianSketchServer)
    assert sorted(server.drawn.columns.tolist()) == [0, 1, 1, 2, 3]
    assert int(server.drawn.sizes.sum()) == sum(len(Z) for clients in tasks for Z, _ in clients)
