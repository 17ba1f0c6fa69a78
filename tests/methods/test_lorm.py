"""LoRM: the merge of a round and of the tasks against least squares on the clients' true inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.methods.transformers.low_rank import LowRank, low_rank_layers
from fcl_bench.protocol.context import TestBatch
from tests.methods.lorm_harness import FC2, QKV, Watched, lorm, rounds_of, setting
from tests.methods.training_harness import images_stream, learn_image_task, learn_images


def stacked(X: list[np.ndarray], W: list[np.ndarray], alpha: float, A: np.ndarray | None = None) -> np.ndarray:
    """The W (o, i) nearest to all W_k on the inputs X_k A', by least squares; damping as further rows of inputs.

    alpha G + (1 - alpha) diag(G) is the Gram matrix of sqrt(alpha) X and sqrt(1 - alpha) diag(G)^(1/2) together.
    Inputs after a layer norm add up to 0, but for float32: what is that small is left out.
    """
    rows, targets = [], []
    for x, w in zip(X, W, strict=True):
        both = np.concatenate([alpha**0.5 * x, (1 - alpha) ** 0.5 * np.diag(np.sqrt(np.square(x).sum(axis=0)))])
        both = both if A is None else both @ A.T
        rows.append(both)
        targets.append(both @ w.T)
    return np.linalg.lstsq(np.concatenate(rows), np.concatenate(targets), rcond=1e-6)[0].T


def assert_same_outputs(found: torch.Tensor, expected: np.ndarray, X: list[np.ndarray], alpha: float) -> None:
    """The same weights; or, where undamped inputs may be few and rounded to float32, the same outputs on these."""
    W = found.double().numpy()
    if alpha < 1:
        np.testing.assert_allclose(W, expected, atol=1e-4)
    rows = np.concatenate(X)
    np.testing.assert_allclose(rows @ W.T, rows @ expected.T, atol=2e-4 * np.abs(rows).max())


@pytest.mark.parametrize(("alpha", "alpha_head"), [(0.0, 0.5), (1.0, 1.0), (0.4, 0.0)])
def test_a_round_is_least_squares_on_the_clients_true_inputs(alpha, alpha_head):
    context, [clients] = setting([[12, 7, 9]])
    method = lorm(alpha=alpha, alpha_head=alpha_head)
    sizes = [len(labels) for _, labels in clients]
    for round_, (before, uploads, inputs, after) in enumerate(rounds_of(method, context, clients, 2)):
        trained, resting = "BA"[round_], "AB"[round_]
        for path in (QKV, FC2):
            part = path.rpartition(".")[2]
            name = f"{path}.{trained}.{part}_0"
            X, W = [own[path] for own in inputs], [upload[name].double().numpy() for upload in uploads]
            A = before[f"{path}.A.{part}_0"].double().numpy() if trained == "B" else None
            expected = stacked(X, W, alpha, A)
            assert_same_outputs(after[name], expected, X if A is None else [x @ A.T for x in X], alpha)
            assert torch.equal(after[f"{path}.{resting}.{part}_0"], before[f"{path}.{resting}.{part}_0"])
            assert not any(f".{resting}." in own for own in uploads[0])
        W = [upload["heads.0.weight"].double().numpy() for upload in uploads]
        features = [own["heads"] for own in inputs]
        assert_same_outputs(after["heads.0.weight"], stacked(features, W, alpha_head), features, alpha_head)
        assert not torch.allclose(after["heads.0.weight"], before["heads.0.weight"], atol=1e-3)
        biases = [upload["heads.0.bias"].double().numpy() for upload in uploads]
        np.testing.assert_allclose(after["heads.0.bias"].numpy(), np.average(biases, axis=0, weights=sizes), atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_one_client_gets_its_own_model_back(alpha):
    """Bit for bit, whatever its inputs are."""
    context, [clients] = setting([[3]])
    for _, [upload], _, after in rounds_of(lorm(alpha=alpha, alpha_head=alpha), context, clients, 2):
        for name, value in upload.items():
            if not name.startswith("gram."):
                assert torch.equal(after[name], value)


def test_grams_are_taken_under_the_mean_and_training_runs_on_the_tasks_own_update():
    context, tasks = setting([[9], [9]])
    method, seen, acting = lorm(), [], []
    server = method.server(context)
    forward = LowRank.forward

    def looked(layer, x):
        acting.append((torch.is_grad_enabled(), dict(layer.scales), bool(layer.merged)))
        return forward(layer, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LowRank, "forward", looked)
        for task, clients in zip(images_stream(tasks), tasks, strict=True):
            acting.clear()
            learn_image_task(method, context, server, task, clients)
            seen.append({(trains, tuple(scales.values()), merged) for trains, scales, merged in acting})
            acting.clear()
            server.classify(TestBatch.of(clients[0][0]))
            assert {merged for _, _, merged in acting} == {True}
    assert seen[1] == {(True, (0.0, 1.0), False), (False, (0.5, 0.5), False)}
    assert seen[0] == {(True, (1.0,), False), (False, (1.0,), False)}


@pytest.mark.slow_cases("1.0")
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_tasks_are_merged_by_least_squares_on_their_inputs(alpha):
    context, tasks = setting([[9, 6], [5, 8]])
    method, inputs, server, deltas = lorm(alpha=alpha, epochs=2), [], None, []
    server, watched = method.server(context), Watched(method, context)
    for task, clients in zip(images_stream(tasks), tasks, strict=True):
        learn_image_task(method, context, server, task, clients)
        # The clients' network under the task's last model, with the mean of the updates.
        own = watched.client
        own.prepare(server.heads)
        own.network.load(server.network.state())
        inputs.append([watched.inputs(images) for images, _ in clients])
        merged = {path: layer.merged for path, layer in low_rank_layers(server.network.body).items()}
        for path in (QKV, FC2):
            part = path.rpartition(".")[2]
            layer = low_rank_layers(server.network.body)[path]
            deltas = [layer.delta(part, done).detach().double().numpy() for done in range(task.index + 1)]
            X = [np.concatenate([client[path] for client in of]) for of in inputs]
            assert_same_outputs(merged[path][part], stacked(X, deltas, alpha), X, alpha)
    assert np.abs(deltas[0] - deltas[1]).max() > 1e-3


def test_a_task_that_is_going_on_is_predicted_by_the_mean_of_the_updates():
    context, tasks = setting([[9], [9]])
    method = lorm()
    server = learn_images(method, context, tasks[:1])
    assert all(layer.merged for layer in low_rank_layers(server.network.body).values())
    server.start_task(images_stream(tasks)[1])
    for layer in low_rank_layers(server.network.body).values():
        assert not layer.merged
        assert layer.scales == {0: 0.5, 1: 0.5}
