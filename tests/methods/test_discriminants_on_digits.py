"""The discriminants on real images (5 tasks, 5 clients, beta .1): the centralised scores, and who is better."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fcl_bench.methods.closed_form.fedklda import FedKLDA
from fcl_bench.methods.closed_form.fedlda import FedLDA
from fcl_bench.methods.closed_form.fedncm import FedNCM
from fcl_bench.methods.closed_form.stsa import STSA
from tests.methods.harness import context_of, dealt, learn


@pytest.fixture(scope="module")
def digits():
    """(one client's tasks, five clients' tasks, test images, test labels)."""
    images, labels = load_digits(return_X_y=True)
    images, rng = images / 16, np.random.default_rng(0)
    order = rng.permutation(len(labels))
    train, test = order[:1300], order[1300:]
    whole = []
    for first in range(0, 10, 2):
        own = train[(labels[train] == first) | (labels[train] == first + 1)]
        whole.append([(images[own], labels[own])])
    return whole, dealt(rng, whole, 5, 0.1), torch.from_numpy(images[test]), labels[test]


METHODS = {
    "ncm": FedNCM(),
    "lda": FedLDA(),
    "klda": FedKLDA(M=300),
    "ensemble": FedKLDA(M=300, ensemble=3),
    "oas": FedLDA(shrinkage="oas", prior="counts"),
}


def accuracy(scores: torch.Tensor, truth: np.ndarray) -> float:
    return float((scores.argmax(dim=1).numpy() == truth).mean())


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_five_clients_have_the_scores_of_one(digits, method):
    whole, parts, test, _ = digits
    [one, five] = [learn(method, context_of(64), tasks)[0].predict(test) for tasks in (whole, parts)]
    assert float((one - five).abs().max() / one.abs().max()) < 1e-8


def test_the_nearest_mean_is_the_floor_and_the_kernel_on_top(digits):
    _, parts, test, truth = digits
    servers = {name: learn(method, context_of(64), parts)[0] for name, method in METHODS.items()}
    found = {name: accuracy(server.predict(test), truth) for name, server in servers.items()}
    assert found["ncm"] + 0.02 < found["lda"] < found["klda"] - 0.01
    assert found["ensemble"] > found["lda"]
    assert found["ncm"] > 0.8


def test_with_rare_classes_discriminants_beat_ridge_regression_on_the_same_features(digits):
    """Ridge has no intercept and weighs classes by their samples. Odd digits lose nine tenths of theirs."""
    _, parts, test, truth = digits
    kept = [[(Z[chosen], labels[chosen]) for Z, labels in task for chosen in [scarce(labels)]] for task in parts]
    [lda, ridge] = [
        accuracy(learn(method, context_of(64), kept)[0].predict(test), truth)
        for method in (FedLDA(), STSA(M=None, gamma="auto"))
    ]
    assert lda > ridge + 0.02


def scarce(labels: np.ndarray) -> np.ndarray:
    """Which samples stay: every even digit's, and each client's first tenth of an odd one's."""
    stays = labels % 2 == 0
    for digit in range(1, 10, 2):
        own = np.flatnonzero(labels == digit)
        stays[own[: -(-len(own) // 10)]] = True
    return stays
