"""RegMean against least squares in NumPy, its limits and resumed runs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.transformers.regmean import RegMean
from fcl_bench.protocol.message import Message
from tests.methods.classical_harness import INPUTS, SIZES, exchanged, feature_tasks, federation, pictures
from tests.methods.regmean_harness import EXACT, joint, model_of_server, regmean
from tests.methods.training_harness import images_stream, learn_images, tiny_context
from tests.methods.whole_runs import feature_context, learnt, model_of, same

# The merge against NumPy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recurring", [False, True])
@pytest.mark.parametrize("damping", [1.0, 0.5, 0.0])
def test_each_round_on_features_is_the_least_squares_of_all_clients_outputs(damping, recurring):
    """In one go: the change of least norm that comes closest to the clients' on all their samples and a constant.

    The second task has as few as 8 samples for 6 numbers each; the last has a client of one sample.
    """
    method, tasks = regmean(trains="features", damping=damping), feature_tasks(recurring)
    context = feature_context(INPUTS, **EXACT)
    rounds: list[tuple[Message, dict]] = []
    ends = []

    def seen(client, broadcast, upload):
        if not rounds or rounds[-1][0] is not broadcast:
            rounds.append((broadcast, {}))
        rounds[-1][1][client] = upload

    learn_images(method, context, tasks, seen=seen, after=lambda _, server: ends.append(model_of_server(server)))
    assert len(rounds) == 6
    for number, (before, uploads) in enumerate(rounds):
        task, last = divmod(number, 2)
        after = ends[task] if last else rounds[number + 1][0]
        inputs = {k: np.c_[tasks[task][k][0].float().double().numpy(), np.ones(SIZES[task][k])] for k in uploads}
        for k, upload in uploads.items():
            G = inputs[k].T @ inputs[k]
            sent = np.diag(G) if damping == 0 else damping * G + (1 - damping) * np.diag(np.diag(G))
            np.testing.assert_allclose(upload["gram.heads"].numpy(), sent, rtol=1e-12, atol=1e-12)
        for head in range(task + 1):
            weight = f"heads.{head}.weight"
            start = joint(before, weight)
            changes = {k: joint(upload, weight) - start for k, upload in uploads.items()}
            assert any(np.abs(change).max() > 1e-3 for change in changes.values())
            if damping == 1:
                outputs = [inputs[k] @ change.T for k, change in changes.items()]
                change = np.linalg.lstsq(np.concatenate(list(inputs.values())), np.concatenate(outputs), rcond=1e-10)[
                    0
                ].T
            else:
                grams = {k: X.T @ X for k, X in inputs.items()}
                grams = {k: damping * G + (1 - damping) * np.diag(np.diag(G)) for k, G in grams.items()}
                change = sum(changes[k] @ G for k, G in grams.items()) @ np.linalg.pinv(sum(grams.values()))
            np.testing.assert_allclose(joint(after, weight), start + change, atol=2e-6)


def fed(method: RegMean, uploads: list[dict[str, torch.Tensor]], inputs: int, classes: int = 1, start: float = 0.0):
    """The server after a round with these uploads, on features, from weights that are all `start`."""
    context = feature_context(inputs, **EXACT)
    server = method.server(context)
    rows = [(torch.zeros(classes, inputs, dtype=torch.float64), torch.arange(classes))]
    [task] = images_stream([rows])
    server.start_task(task)
    for value in server.network.parameters():
        value.data.fill_(start)
    server.broadcast(task, 0)
    for k, upload in enumerate(uploads):
        server.absorb(k, Message(upload, samples=3))
    server.finish_round()
    return server.network.heads[0]


def of_client(weight, bias, gram) -> dict[str, torch.Tensor]:
    values = {"heads.0.weight": weight, "heads.0.bias": bias, "gram.heads": gram}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def test_the_hand_value_with_a_bias():
    """One sample each, x = 1 and x = -1: the sum of the Gram matrices is 2 I, and both outputs (3 and 2) are met."""
    one = of_client([[2.0]], [1.0], [[1.0, 1.0], [1.0, 1.0]])
    other = of_client([[1.0]], [3.0], [[1.0, -1.0], [-1.0, 1.0]])
    head = fed(regmean(trains="features"), [one, other], 1, start=7.0)
    assert (head.weight.item(), head.bias.item()) == (0.5, 2.5)


def test_the_hand_value_of_diagonals():
    """Column by column, sum_k w_k g_k / sum_k g_k; the bias by numbers of samples. No input: the average."""
    one = of_client([[2.0, 5.0]], [1.0], [3.0, 0.0, 4.0])
    other = of_client([[6.0, 5.0]], [2.0], [1.0, 0.0, 12.0])
    head = fed(regmean(trains="features", damping=0.0), [one, other], 2, start=9.0)
    np.testing.assert_allclose(head.weight.detach().numpy(), [[3.0, 5.0]])
    np.testing.assert_allclose(head.bias.detach().numpy(), [1.75])


@pytest.mark.parametrize("damping", [1.0, 0.0])
def test_the_same_layer_at_all_clients_stays_whatever_their_inputs_are(damping):
    rng = np.random.default_rng(0)
    W, b = rng.standard_normal((3, 4)), rng.standard_normal(3)
    uploads = []
    for rows in (9, 4, 30):
        X = np.c_[rng.standard_normal((rows, 4)) * rng.uniform(0.1, 5), np.ones(rows)]
        uploads.append(of_client(W, b, X.T @ X if damping else (X**2).sum(axis=0)))
    head = fed(regmean(trains="features", damping=damping), uploads, 4, 3, start=0.3)
    np.testing.assert_allclose(head.weight.detach().numpy(), W, atol=1e-6)
    np.testing.assert_allclose(head.bias.detach().numpy(), b, atol=1e-6)


@pytest.mark.parametrize("trains", ["features", "images"])
def test_a_single_client_gets_its_own_model_back(trains):
    """So that the method is finetuning, also where features that a head trained on are gone in the end."""
    method = regmean(trains=trains)
    tasks = [clients[:1] for clients in (feature_tasks() if trains == "features" else pictures())]
    context = feature_context(INPUTS, **EXACT) if trains == "features" else tiny_context(**EXACT)
    both = (method, FedAvg(method.training, trains=trains, loss_classes="seen"))
    ours, theirs = (learn_images(m, context, tasks).network.state() for m in both)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=2e-6, rtol=1e-5)


def test_inputs_that_are_the_same_at_all_clients_give_the_average():
    """Two clients with the same features and other labels: the plain average of the models, as fedavg has it."""
    X = torch.from_numpy(np.random.default_rng(3).standard_normal((12, INPUTS)))
    labels = torch.arange(12) % 3
    tasks = [[(X, labels), (X, labels.flip(0).roll(1))]]
    context, method = feature_context(INPUTS, **EXACT), regmean(trains="features")
    ours, theirs = (
        learn_images(m, context, tasks).network.state()
        for m in (method, FedAvg(method.training, trains="features", loss_classes="seen"))
    )
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-6, rtol=1e-5)
    tasks[0][1] = (3 * X.flip(1), tasks[0][1][1])
    ours, theirs = (
        learn_images(m, context, tasks).network.state()
        for m in (method, FedAvg(method.training, trains="features", loss_classes="seen"))
    )
    assert float((ours["heads.0.weight"] - theirs["heads.0.weight"]).abs().max()) > 1e-3


# Resuming -------------------------------------------------------------------------------------------------------------


def test_clients_without_labels_take_no_part():
    method = regmean(trains="features")
    whole = learnt(method, feature_context(INPUTS), feature_tasks(), unlabelled=[(0, 1), (2, 0)])
    sent = {(row.task, row.client) for row in exchanged(whole) if row.up_bytes}
    assert (0, 0) in sent
    assert not {(0, 1), (2, 0)} & sent


# Knobs ----------------------------------------------------------------------------------------------------------------


def test_another_optimiser_at_the_server_is_refused():
    with pytest.raises(UserError, match=r"method\.training\.server_optimizer=adam: .*server_optimizer=average"):
        regmean(server_optimizer="adam").check(tiny_context(), [2, 2])


def test_the_gaussian_head_works_beside_it():
    method = dataclasses.replace(regmean(trains="features"), ccvr="gaussian")
    found = federation(method)
    assert {row.stage for row in exchanged(found)} == {"model", "moments"}


def test_the_seed_decides():
    first, again, other = (
        model_of(learnt(regmean(trains="features"), feature_context(INPUTS, seed=seed), feature_tasks()))
        for seed in (0, 0, 1)
    )
    assert same(first, again)
    assert not same(first, other)
