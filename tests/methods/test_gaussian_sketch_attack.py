"""What the Gaussian sketch's upload reveals of a client with three samples of one class: all three, at any width.

The mean and the coded directions in the backbone's features tell the three up to a rotation of their plane. The coded
directions of the random features then tell which rotation it was, since ReLU does not commute with rotations.
"""

from __future__ import annotations

import numpy as np
import pytest

from fcl_bench.methods.closed_form.algebra.coding import decoded
from fcl_bench.methods.closed_form.gaussian_sketch import GaussianSketch
from tests.methods.harness import context_of, over_the_wire, shard_of, stream_of, turn
from tests.methods.test_stsa_attack import apples, made, worst

SAMPLES = 3
ANGLES = np.linspace(0, 2 * np.pi, 180, endpoint=False)


def sent(M: int, Z: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of a client with these samples of one class: P (d, M), their mean (d,), and F (M, 2), F_z (d, 2) decoded."""
    method = GaussianSketch(M=M)
    context, labels = context_of(Z.shape[1], wire="float16"), np.zeros(len(Z), dtype=np.int64)
    server, [task] = method.server(context), stream_of([[(Z, labels)]])
    server.start_task(task)
    upload = turn(method.client(context), shard_of(0, 0, Z, labels), server.broadcast(task, 0))
    upload = over_the_wire(upload, method, context)
    step, step_z = upload["steps"].tolist()
    F = decoded(upload["codes"], step, M, method.rank)
    F_z = decoded(upload["codes_z"], step_z, Z.shape[1], method.class_rank)
    P = server.random_features.projection
    assert F is not None
    assert F_z is not None
    assert P is not None
    return P.numpy(), upload["S_z"][:, 0].numpy() / SAMPLES, F.numpy(), F_z.numpy()


def read_off(P: np.ndarray, mean: np.ndarray, F: np.ndarray, F_z: np.ndarray) -> np.ndarray:
    """(3, d): of all rotations and reflections the samples whose random features vary most nearly as F says."""
    corners = np.linalg.svd(np.eye(SAMPLES) - 1 / SAMPLES)[0][:, : SAMPLES - 1]  # (3, 2), of the plane of sum 0
    best, least = np.zeros((0, 0)), np.inf
    for angle in ANGLES:
        for mirrored in (1, -1):
            turned = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) * [1, mirrored]
            Z = mean + corners @ turned @ F_z.T
            H = np.maximum(Z @ P, 0)
            A = H - H.mean(0)
            # |A'A - F F'|^2 but for |F F'|^2, without an M x M matrix.
            difference = np.square(A @ A.T).sum() - 2 * np.square(A @ F).sum()
            if difference < least:
                best, least = Z, difference
    return best


@pytest.mark.slow_cases("8192-apples", "8192-made", "256-apples")
@pytest.mark.parametrize("draw", [made, apples])
@pytest.mark.parametrize("M", [256, 8192])
def test_three_samples_of_one_class_are_found(M, draw):
    """Each to a ninth, about the coding's error at either width. Their mean, which S_z tells, is far from each."""
    Z = draw(SAMPLES, seed=0)
    P, mean, F, F_z = sent(M, Z)
    assert worst(read_off(P, mean, F, F_z), Z) < 1 / 9
    assert worst(mean[None], Z) > 0.4
