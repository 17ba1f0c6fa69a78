"""What STSA's upload reveals of a client with few samples: every one of them. STSA's Table 6 inverts the
upload as a whole, and finds little; but the Gram matrix of a few features gives each of them away.

The attack is `read_off` of benchmarks/feature_inversion.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from feature_inversion import features_of, read_off

from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.methods.closed_form.stsa_e import STSAE
from fcl_bench.protocol.message import Message
from tests.conftest import shared
from tests.methods.harness import context_of, over_the_wire, shard_of, stream_of, turn

APPLE = 0  # of CIFAR-100's classes, in alphabetical order
M = 1250


def made(samples: int, seed: int) -> np.ndarray:
    """(n, 64) features of one class as a pooled ReLU leaves them: positive, and alike."""
    rng = np.random.default_rng(seed)
    return np.maximum(1 + rng.standard_normal(64) + rng.standard_normal((samples, 64)), 0)


def apples(samples: int, seed: int) -> np.ndarray:
    """(n, 512) features of so many training images."""
    with np.load(shared("data/cifar100-mobilenetv2.npz")) as file:
        of_class = file["x_train"][file["y_train"] == APPLE].astype(np.float64)
    return np.random.default_rng(seed).permutation(of_class)[:samples]


def sent(method: STSA | STSAE, Z: np.ndarray) -> tuple[Message, np.ndarray]:
    """What a client with these samples of one class sends in float32, and P (d, M)."""
    context, labels = context_of(Z.shape[1], wire="float32"), np.zeros(len(Z), dtype=np.int64)
    server, [task] = method.server(context), stream_of([[(Z, labels)]])
    server.start_task(task)
    upload = turn(method.client(context), shard_of(0, 0, Z, labels), server.broadcast(task, 0))
    random_features = server.random_features.projection
    assert random_features is not None
    return over_the_wire(upload, method, context), random_features.numpy()


def worst(found: np.ndarray, true: np.ndarray) -> float:
    """The largest relative distance of a true feature from the nearest that was found."""
    distances = np.linalg.norm(true[:, None] - found[None], axis=2) / np.linalg.norm(true, axis=1)[:, None]
    return float(distances.min(1).max())


@pytest.mark.slow_cases("10-apples", "3-apples")
@pytest.mark.parametrize("draw", [made, apples])
@pytest.mark.parametrize("samples", [3, 10])
def test_a_gram_matrix_of_few_samples_is_their_features(draw, samples):
    """Table 6's client has three; ten are found as well, all to a millionth."""
    Z = draw(samples, seed=samples)
    upload, P = sent(STSA(M=M), Z)
    found = features_of(read_off(upload["G"].numpy(), upload["C"].numpy()[:, 0], samples), P)
    assert worst(found, Z) < 1e-6


@pytest.mark.slow
def test_of_twenty_samples_some_stay_hidden_from_this_attack():
    """Few entries are left in which one sample is active alone."""
    Z = apples(20, seed=0)
    upload, P = sent(STSA(M=M), Z)
    H = np.maximum(Z @ P, 0)
    found = read_off(upload["G"].numpy(), upload["C"].numpy()[:, 0], 20)
    assert worst(found, H) > 0.1


def test_class_sums_of_stsa_e_are_a_mean_without_dummy_clients_and_features_with_them():
    """Table 6 has none. With 50 of them no two of the three samples share a group."""
    Z = apples(3, seed=3)
    upload, P = sent(STSAE(M=M, dummy_clients=1), Z)
    H = np.maximum(Z @ P, 0)
    assert round(worst(upload["C"].numpy().T / upload["n"].numpy(), H), 1) == 0.5
    upload, _ = sent(STSAE(M=M, dummy_clients=50), Z)
    alone = upload["n"].numpy()[:, 0] == 1
    assert alone.sum() == 3
    assert worst(upload["C"].numpy().T[alone], H) < 1e-6
