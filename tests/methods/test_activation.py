"""`method.activation`: of every method on random features, with nothing between the projection and the method."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.closed_form.afcl import AFCL
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.air import AIR
from fcl_bench.methods.closed_form.base import ClosedFormMethod
from fcl_bench.methods.closed_form.centralised_ridge import CentralisedRidge
from fcl_bench.methods.closed_form.centralised_softmax import CentralisedSoftmax
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch
from fcl_bench.methods.closed_form.ds_al import DSAL
from fcl_bench.methods.closed_form.fedfecam import FedFeCAM
from fcl_bench.methods.closed_form.fedlda import FedLDA
from fcl_bench.methods.closed_form.fedncm import FedNCM
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.methods.closed_form.ranpac import RanPAC
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.methods.closed_form.stsa_e import STSAE
from fcl_bench.typed import typed_instance
from tests.methods.harness import context_of, draw_tasks, learn, projection_of, relative_error
from tests.small_methods import NAMES, class_of

LINEAR = {"M": 6, "activation": "none"}
METHODS = [
    AFCL(**LINEAR),
    AFL(**LINEAR),
    AIR(**LINEAR, gamma=2.0),
    CentredSketch(**LINEAR, rank=2),
    DSAL(**LINEAR),
    FedFeCAM(**LINEAR, tukey=1),
    FedLDA(**LINEAR),
    FedNCM(**LINEAR),
    FedRAN(**LINEAR, rank=3),
    FedRAN(**LINEAR, rank=3, complement="floor", bounds=True),
    CentralisedRidge(**LINEAR),
    CentralisedSoftmax(**LINEAR),
    RanPAC(**LINEAR),
    STSA(**LINEAR, gamma=2.0),
    STSAE(**LINEAR, gamma=2.0, dummy_clients=3),
]
TASKS = draw_tasks(np.random.default_rng(0), 8, [2, 3], [[25, 1, 12], [6, 0, 30]])
TESTS = np.random.default_rng(1).standard_normal((40, 8))


def after(tasks, P: np.ndarray):
    """The same tasks, of features Z P."""
    return [[(Z @ P, labels) for Z, labels in clients] for clients in tasks]


@pytest.mark.slow_cases("centralised_softmax-matrix", "centralised_softmax-seed")
@pytest.mark.parametrize("projection", ["seed", "matrix"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_without_it_a_method_is_itself_on_the_projected_features(method, projection):
    server, _ = learn(method, context_of(8, projection=projection), TASKS)
    P = projection_of(server)
    plain = dataclasses.replace(method, M=None, activation="relu")
    expected, _ = learn(plain, context_of(6), after(TASKS, P))
    scores = server.predict(torch.from_numpy(TESTS))
    assert relative_error(scores, expected.predict(torch.from_numpy(TESTS @ P)).numpy()) < 1e-8
    with_relu, _ = learn(dataclasses.replace(method, activation="relu"), context_of(8, projection=projection), TASKS)
    assert relative_error(scores, with_relu.predict(torch.from_numpy(TESTS)).numpy()) > 1e-3


def test_every_method_on_random_features_is_among_them():
    closed = {name for name in NAMES if issubclass(class_of(name), ClosedFormMethod)}
    # FedKLDA has features of its own, and the Gaussian sketch knows what ReLU does to Gaussian classes.
    assert {method.name for method in METHODS} == closed - {"fedklda", "gaussian_sketch"}


@pytest.mark.parametrize("M", [8, 20])
@pytest.mark.parametrize("method", [FedRAN, STSA, CentralisedRidge], ids=lambda method: method.name)
def test_a_linear_projection_of_full_rank_changes_no_class(method, M):
    """FedRAN Fig. 7: H W = Z (P W), and P W can be any matrix, so least squares finds the same scores as on Z."""
    ridge = {"gamma": 1e-9} if method is STSA else {"ridge": 1e-9}
    whole = {"rank": None} if method is FedRAN else {}
    inputs = torch.from_numpy(TESTS)
    raw, linear, relu = (
        learn(method(**knobs, **ridge, **whole), context_of(8), TASKS)[0].predict(inputs)
        for knobs in ({"M": None}, {"M": M, "activation": "none"}, {"M": M})
    )
    assert relative_error(linear, raw.numpy()) < 1e-6
    assert torch.equal(linear.argmax(dim=1), raw.argmax(dim=1))
    assert relative_error(relu, raw.numpy()) > 0.1
    if M == 8:
        # Of fewer random directions than features it is another class of classifiers, a smaller one.
        narrow = learn(method(M=5, activation="none", **ridge, **whole), context_of(8), TASKS)[0].predict(inputs)
        assert relative_error(narrow, raw.numpy()) > 0.1


@pytest.mark.slow
def test_the_ridge_on_linear_features_is_a_smaller_one_on_the_features():
    """||W||^2 is least at tr V'(PP')^-1 V for V = P W, and PP' is about M I: a ridge lambda of H is lambda / M of Z."""
    server, _ = learn(STSA(M=4000, activation="none", gamma=4000.0), context_of(8), TASKS)
    raw, _ = learn(STSA(M=None, gamma=1.0), context_of(8), TASKS)
    inputs = torch.from_numpy(TESTS)
    assert relative_error(server.predict(inputs), raw.predict(inputs).numpy()) < 0.02
    # Exactly: Z (Z'Z + lambda (PP')^-1)^-1 Z'Y.
    P = projection_of(server)
    Z, labels = (np.concatenate(parts) for parts in zip(*(own for task in TASKS for own in task), strict=True))
    V = np.linalg.solve(Z.T @ Z + 4000 * np.linalg.inv(P @ P.T), Z.T @ np.eye(5)[labels])
    assert relative_error(server.predict(inputs), TESTS @ V) < 1e-7


@pytest.mark.parametrize("method", [FedRAN, AFL, FedFeCAM, FedNCM, RanPAC, CentredSketch])
def test_without_a_projection_there_is_none_to_leave_out(method):
    knobs = {"M": None, "activation": "none"} | ({"rank": 2} if method in (FedRAN, CentredSketch) else {})
    with pytest.raises(UserError) as error:
        method(**knobs)
    assert str(error.value) == (
        "method.activation=none has no meaning with method.M=null, where nothing is projected"
        " (a number for method.M, or without method.activation)"
    )


def test_what_it_may_be():
    with pytest.raises(UserError, match=r"method.activation=tanh is not known"):
        typed_instance(STSA, {"M": 8, "activation": "tanh"}, "method")
    with pytest.raises(UserError, match=r"method.activation=cos is not known"):
        typed_instance(FedRAN, {"M": 8, "activation": "cos"}, "method")
    with pytest.raises(UserError, match=r"takes features that are not negative.*method.activation=relu"):
        learn(FedFeCAM(**LINEAR), context_of(8), TASKS)
