"""Feature drift against FedRAN's Eq. 2, sample by sample."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fcl_bench.execution.drift import FeatureDrift, drift_matrix
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.protocol.audit import FullData
from fcl_bench.protocol.context import Context, Task
from fcl_bench.training.knobs import Training
from tests.methods.training_harness import federation_of, image_tasks, tiny_context

#: [task][client] -> indices of training samples; a client without any, one with fewer than are asked for.
SHARDS = [
    [np.array([0, 1, 2, 3, 4, 5, 6]), np.array([7]), np.array([8, 9, 10, 11])],
    [np.array([], dtype=int), np.array([12, 13, 14, 15, 16]), np.array([17, 18])],
    [np.array([19, 20, 21]), np.array([], dtype=int), np.array([22, 23, 24, 25])],
]
#: (task s, reference task tau), in the order in which they are measured.
MEASURED = [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
FEATURES = np.random.default_rng(0).standard_normal((4, 26, 5)).astype(np.float32)


class Extractor:
    """g_task, known by its table of features; samples are their own indices."""

    def __init__(self, task: int, dtype: torch.dtype = torch.float32) -> None:
        self._features = torch.from_numpy(FEATURES[task]).to(dtype)

    def embed(self, indices: torch.Tensor) -> torch.Tensor:
        return self._features[indices]


def report(drift: FeatureDrift, task: int, calls: list | None = None, dtype: torch.dtype = torch.float32) -> None:
    """Measure after a task; `calls` notes which training samples are looked at."""

    def train(indices: np.ndarray) -> torch.Tensor:
        if calls is not None:
            calls.append(indices)
        return torch.from_numpy(indices)

    drift.report(Task(task, range(task, task + 1), task + 1), Extractor(task, dtype), FullData(list, train))


def measured(samples: int, seed: int = 0, tasks: int = 3) -> tuple[FeatureDrift, list]:
    drift, calls = FeatureDrift(samples, seed, SHARDS), []
    for task in range(tasks):
        report(drift, task, calls)
    return drift, calls


@pytest.mark.parametrize("samples", [1, 3, 100])
def test_drift_is_the_mean_distance_of_the_reference_samples_features(samples):
    drift, calls = measured(samples)
    chosen = {}
    for (_, tau), indices in zip(MEASURED, calls, strict=True):
        chosen.setdefault(tau, indices)
        np.testing.assert_array_equal(indices, chosen[tau])  # the same ones after every task
    expected = []
    for s in range(3):
        for tau in range(s + 1):
            for client, client_data in enumerate(SHARDS[tau]):
                R = [x for x in chosen[tau] if x in client_data]
                assert len(R) == min(samples, len(client_data))
                if R:
                    moved = [np.sqrt(((FEATURES[s][x] - FEATURES[tau][x]) ** 2).sum()) for x in R]
                    size = [np.sqrt((FEATURES[tau][x] ** 2).sum()) for x in R]
                    expected.append((s, tau, client, len(R), np.mean(moved), np.mean(size)))
    assert len(drift.rows) == len(expected)
    for row, (s, tau, client, count, moved, size) in zip(drift.rows, expected, strict=True):
        assert (row["task"], row["reference_task"], row["client"], row["samples"]) == (s, tau, client, count)
        assert row["drift"] == pytest.approx(moved, rel=1e-5)
        assert row["norm"] == pytest.approx(size, rel=1e-5)
        assert list(row) == ["task", "reference_task", "client", "samples", "drift", "norm"]


@pytest.mark.parametrize("samples", [2, 100])
def test_the_matrix_is_the_mean_over_all_reference_samples_of_a_task(samples):
    drift, calls = measured(samples)
    matrix = drift_matrix(drift.rows, 3)
    for (s, tau), R in zip(MEASURED, calls, strict=True):
        distance = np.linalg.norm(FEATURES[s][R].astype(float) - FEATURES[tau][R], axis=1)
        assert matrix[s, tau] == pytest.approx(distance.mean(), rel=1e-5)
    assert np.isnan(matrix[np.triu_indices(3, 1)]).all()
    assert (np.diag(matrix) == 0).all()


def test_the_matrix_of_a_stream_that_is_not_over_is_empty_below():
    drift, _ = measured(2, tasks=2)
    assert np.isnan(drift_matrix(drift.rows, 3)[2]).all()


def test_reference_samples_are_random_fixed_by_the_seed_and_everyones_own():
    def chosen(seed):
        return np.concatenate(measured(3, seed, tasks=1)[1])

    assert chosen(0).tolist() == chosen(0).tolist()
    assert len({tuple(chosen(seed)) for seed in range(8)}) > 3
    for seed in range(8):
        assert len(set(chosen(seed))) == 3 + 1 + 3


def test_a_measurement_goes_on_through_json_and_tensors():
    whole, _ = measured(3)
    parts, _ = measured(3, tasks=2)
    rows, tensors = (
        json.loads(json.dumps(parts.rows)),
        {name: value.clone() for name, value in parts.state_dict().items()},
    )
    resumed = FeatureDrift(3, 0, SHARDS)
    resumed.rows = rows
    resumed.load_state_dict(tensors)
    report(resumed, 2)
    assert resumed.rows == whole.rows
    assert set(resumed.state_dict()) == set(whole.state_dict())
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_features_of_any_type_are_measured_in_float32(dtype):
    drift = FeatureDrift(9, 0, SHARDS)
    for task in range(2):
        report(drift, task, dtype=dtype)
    exact, _ = measured(9, tasks=2)
    for row, wanted in zip(drift.rows, exact.rows, strict=True):
        assert row["drift"] == pytest.approx(wanted["drift"], rel=0.01)


def test_under_a_method_that_trains_features_drift_and_the_newest_tasks_do_not():
    tasks = image_tasks(np.random.default_rng(0), [2, 2, 2], [[9, 4, 0], [8, 8, 8], [0, 9, 6]])
    method = FedAvg(training=Training(rounds=1, epochs=1, augment="none"))
    federation = federation_of(method, tiny_context(), tasks, drift=3)
    stages = []
    data, drift = federation.transport.everything, federation.audits["drift"]
    everyone = data.inputs(np.arange(sum(len(labels) for clients in tasks for _, labels in clients)))
    federation.run(lambda done: stages.append(done.server.embed(everyone).clone()))
    matrix = drift_matrix(drift.rows, 3)
    assert (np.diag(matrix) == 0).all()
    assert (matrix[np.tril_indices(3, -1)] > 0).all()
    for row in drift.rows:
        client_data = data.holdings[row["reference_task"]][row["client"]]
        moved = (stages[row["task"]] - stages[row["reference_task"]])[client_data].norm(dim=1)
        assert float(moved.min()) - 1e-6 <= row["drift"] <= float(moved.max()) + 1e-6
        if row["samples"] == len(client_data):
            assert row["drift"] == pytest.approx(float(moved.mean()), rel=1e-5, abs=1e-7)


def test_under_a_frozen_backbone_nothing_drifts():
    tasks = image_tasks(np.random.default_rng(0), [2, 2], [[9, 4], [8, 8]], size=2)
    flat = [[(images.flatten(1).double(), labels) for images, labels in clients] for clients in tasks]
    context = tiny_context()
    context = Context(12, 0, torch.float64, context.device, context.wire)
    federation = federation_of(AFL(gamma=1.0), context, flat, drift=3)
    federation.run(lambda _: None)
    assert [row["drift"] for row in federation.audits["drift"].rows] == [0.0] * 6
    assert all(row["norm"] > 0 for row in federation.audits["drift"].rows)
