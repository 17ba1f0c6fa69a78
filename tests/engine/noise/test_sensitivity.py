"""One sample's share in an upload, by brute force: what replacing it changes, in units of the noise that is added."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.fedlda import FedLDA
from fcl_bench.methods.closed_form.fedncm import FedNCM
from fcl_bench.methods.closed_form.ranpac import RanPAC
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.options.noise.gaussian import Gaussian
from fcl_bench.options.noise.mechanism import DPMechanism, NoisyStatistics, deviations, sensitivity, simulated
from fcl_bench.protocol.context import Task
from fcl_bench.protocol.fields import COLUMN, COUNT, SQUARE, Uploads
from fcl_bench.protocol.message import Message
from tests.methods.harness import context_of, shard_of, turn
from tests.methods.training_harness import tiny_context
from tests.small_methods import ALIASES, NAMES, architecture, class_of

#: What is declared, all of it: adding to this list is a claim about a method's uploads that this file has to try.
STATISTICS = {"acil", "fed3r", "fedlda", "fedncm", "gacl", "ranpac", "stsa"}
UPDATES = {
    *("coda_prompt", "cprompt", "dualprompt", "fedavg", "feddyn", "fedlwf"),
    *("fedntd", "fedprox", "l2p", "mfcl", "moon", "target"),
}
METHODS = [STSA(M=None), STSA(M=12), RanPAC(M=None), AFL(upload="sums"), FedNCM(), FedLDA(), FedLDA(M=12)]
CLIP, TASK = 0.7, Task(0, range(3), 3, (0, 1, 2))


def noisy_context(method, clip=CLIP, multiplier=1.0, inputs=4):
    release = Gaussian(multiplier=multiplier, clip=clip).release(method, context_of(inputs))
    return dataclasses.replace(context_of(inputs), release=release)


def upload_of(method, context, Z, labels) -> Message:
    server, client = method.server(context), method.client(context)
    server.start_task(TASK)
    return turn(client, shard_of(0, 0, np.asarray(Z, float), np.asarray(labels)), server.broadcast(TASK, 0))


def distance(one: Message, other: Message, release: DPMechanism) -> float:
    """Mahalanobis' distance of two uploads under the noise: the root of the sum over independent numbers."""
    assert set(one) == set(release.deviation)
    total = 0.0
    for name, deviation in release.deviation.items():
        apart = (one[name].double() - other[name].double()).numpy() / deviation
        if release.summands[name] == SQUARE:
            assert np.array_equal(apart, apart.T)
            total += (np.diag(apart) ** 2).sum() + 2 * (np.triu(apart, 1) ** 2).sum()
        else:
            total += (apart**2).sum()
    return math.sqrt(total)


def uploads_of(method) -> Uploads:
    context = tiny_context(architecture=architecture(method.name)) if method.trains_network else context_of(4)
    return Uploads.of(method, context)


def test_what_is_bounded_is_declared_and_nothing_else():
    found = {name: uploads_of(class_of(name)()) for name in NAMES}
    assert {name for name, uploads in found.items() if uploads.one_sample()} == STATISTICS - set(ALIASES)
    assert {name for name, uploads in found.items() if uploads.only_models} == UPDATES
    assert not uploads_of(AFL()).one_sample(), "a solution depends on one sample as nobody has bounded it"
    assert not uploads_of(RanPAC(ridge="held_out")).one_sample()
    assert not uploads_of(class_of("fedavg")(ccvr="gaussian")).only_models
    assert uploads_of(class_of("fedicarl")(classify="softmax")).only_models


@pytest.mark.slow_cases("fedlda-12", "fedlda-None", "fedncm-None", "stsa-12")
@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.name}-{method.M}")
def test_replacing_a_sample_never_moves_an_upload_further_than_the_bound(method):
    """Any data, any replaced sample, any class: with a multiplier of 1 no two uploads are more than 1 apart."""
    context, rng = noisy_context(method), np.random.default_rng(0)
    furthest = 0.0
    for _ in range(150):
        n = int(rng.integers(1, 6))
        # From far below the clip to far above it.
        Z = rng.standard_normal((n, 4)) * 10 ** rng.uniform(-2, 2, (n, 1))
        labels = rng.integers(0, 3, n)
        other, relabelled = Z.copy(), labels.copy()
        other[0] = (
            rng.choice([-1, 1]) * Z[0] if rng.random() < 0.3 else rng.standard_normal(4) * 10 ** rng.uniform(-2, 2)
        )
        relabelled[0] = rng.integers(0, 3)
        one, two = upload_of(method, context, Z, labels), upload_of(method, context, other, relabelled)
        furthest = max(furthest, distance(one, two, context.release))
    assert 0.3 < furthest <= 1 + 1e-9


@pytest.mark.slow_cases("afl", "fedlda", "fedncm", "ranpac", "stsa")
@pytest.mark.parametrize("method", [method for method in METHODS if method.M is None], ids=lambda method: method.name)
def test_the_worst_case_attains_the_bound(method):
    """Found by search, so that the bound is not merely safe: the noise is no larger than it has to be."""
    context, rng = noisy_context(method), np.random.default_rng(1)

    def apart(Z, label) -> float:
        one, two = (
            upload_of(method, context, [z], [y]) for z, y in zip(np.reshape(Z, (2, 4)), (0, label), strict=True)
        )
        return distance(one, two, context.release)

    worst = {}
    for label in (0, 1):
        starts = [rng.standard_normal(8) * 3 for _ in range(3)]
        worst[label] = max(-minimize(lambda Z: -apart(Z, label), start, tol=1e-12).fun for start in starts)  # noqa: B023
    assert max(worst.values()) == pytest.approx(1, abs=1e-6)
    if "n" in context.release.summands:
        # The counts' weight is the largest for which a change of class is no worse than one of features.
        assert min(worst.values()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("kinds", "squared", "weight"),
    [
        ((SQUARE, COLUMN), 4.5, 0),
        ((SQUARE, COLUMN, COUNT), 4.5, 0.5),
        ((COLUMN, COUNT), 4, 1),
        ((COLUMN,), 4, 0),
        ((SQUARE,), 2, 0),
        ((SQUARE, COUNT), 4, 1),
        ((COUNT,), 2, 1),
    ],
)
def test_the_bound_is_the_maximum_over_two_samples(kinds, squared, weight):
    """By a grid over the angle and both lengths, from the definition of the fields."""
    delta, own = sensitivity(dict.fromkeys(kinds, "") | {kind: kind for kind in kinds})
    assert (delta**2, own) == (pytest.approx(squared), pytest.approx(weight))
    p, q, t = np.meshgrid(np.linspace(0, 1, 41), np.linspace(0, 1, 41), np.linspace(-1, 1, 81))
    G = p**4 + q**4 - 2 * (p * q * t) ** 2
    same = (SQUARE in kinds) * G + (COLUMN in kinds) * (p**2 + q**2 - 2 * p * q * t)
    different = (SQUARE in kinds) * G + (COLUMN in kinds) * (p**2 + q**2) + (COUNT in kinds) * 2 * weight**2
    assert max(same.max(), different.max()) == pytest.approx(squared, abs=1e-9)


def test_every_field_is_scaled_by_its_own_power_of_the_clip():
    small, large = (deviations({"G": SQUARE, "S": COLUMN, "n": COUNT}, clip, 2.0) for clip in (1.0, 3.0))
    assert {name: large[name] / small[name] for name in small} == pytest.approx({"G": 9, "S": 3, "n": 1})
    assert small["n"] == pytest.approx(2 * math.sqrt(4.5) / 0.5)
    for wrong in ({}, {"a": COLUMN, "b": COLUMN}):
        with pytest.raises(ValueError):
            sensitivity(wrong)


def test_what_nobody_bounded_does_not_leave():
    method = STSA(M=None)
    step = NoisyStatistics(simulated(0), noisy_context(method).release)
    with pytest.raises(ValueError, match="W"):
        step.send(Message({"G": torch.zeros(4, 4), "W": torch.zeros(4, 3)}), 0)


def test_rows_are_clipped_after_the_map_on_both_sides():
    method = STSA(M=12)
    context = noisy_context(method)
    server, client = method.server(context), method.client(context)
    server.start_task(TASK)
    z = torch.randn(50, 4, dtype=torch.float64) * torch.logspace(-3, 3, 50, dtype=torch.float64).unsqueeze(1)
    for features in (client.random_features(server.broadcast(TASK, 0)), server.random_features):
        H, plain = features.map(z), torch.relu(z @ features.projection)
        lengths = torch.linalg.vector_norm(plain, dim=1)
        assert torch.equal(H[lengths <= CLIP], plain[lengths <= CLIP])
        assert torch.allclose(torch.linalg.vector_norm(H, dim=1), lengths.clamp_max(CLIP))
        assert torch.allclose(torch.nn.functional.normalize(H), torch.nn.functional.normalize(plain))
    assert float(server.random_features.map(z[:0]).sum()) == 0
    whole = dataclasses.replace(context, wire=dataclasses.replace(context.wire, projection="matrix"))
    server = method.server(whole)
    server.start_task(TASK)
    given = method.client(whole).random_features(server.broadcast(TASK, 0))
    assert torch.equal(given.map(z), client.random_features(method.server(context).broadcast(TASK, 0)).map(z))
