"""FediCaRL: its losses, its limits, the nearest mean and its knobs, against plain NumPy in float64."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from fcl_bench.engine.codec import Middleware
from fcl_bench.engine.in_process import InProcess
from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.centralised import Centralised
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.exemplars.fedicarl import EXEMPLARS, Binary
from fcl_bench.protocol.context import TestBatch
from fcl_bench.training.network import Heads
from fcl_bench.training.objective import Distilled
from tests.methods.fedicarl_harness import (
    CLIENTS,
    SIZES,
    both,
    context_on,
    fedicarl,
    kept_by,
    learnt,
    plain_directions,
    rows,
    tasks_on,
    trained_on,
    training,
)
from tests.methods.plain_training import differing, state_of
from tests.methods.training_harness import federation_of
from tests.small_methods import short_run
from tests.small_runs import run_in

# The loss -------------------------------------------------------------------------------------------------------------


def softmax(q: np.ndarray) -> np.ndarray:
    powers = np.exp(q - q.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def ce_kd(q, y, old, strength, T):
    classified = -np.mean(np.log(softmax(q))[np.arange(len(q)), y])
    distilled = -np.mean((softmax(old / T) * np.log(softmax(q[:, : old.shape[1]] / T))).sum(axis=1))
    return classified + strength * distilled


def bce(q, y, old, strength, own):
    sigma = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    targets = np.eye(q.shape[1])[y]
    for c in range(old.shape[1]):
        if c not in own:
            targets[:, c] = (1 - strength) * targets[:, c] + strength * sigma(old[:, c])
    p = sigma(q)
    return -np.mean((targets * np.log(p) + (1 - targets) * np.log(1 - p)).sum(axis=1))


def drawn(seed: int):
    """Scores (7, 5) of three old and two new columns, labels among all, and a teacher's scores (7, 3)."""
    rng = np.random.default_rng(seed)
    return 2 * rng.standard_normal((7, 5)), rng.integers(0, 5, 7), 2 * rng.standard_normal((7, 3))


def gradient_of(loss, q: np.ndarray) -> np.ndarray:
    """By central differences."""
    found = np.zeros_like(q)
    for place in np.ndindex(*q.shape):
        step = np.zeros_like(q)
        step[place] = 1e-6
        found[place] = (loss(q + step) - loss(q - step)) / 2e-6
    return found


def of_ours(objective, q, y):
    scores = torch.from_numpy(q).requires_grad_()
    loss = objective.score_loss(scores, torch.from_numpy(y), torch.zeros(len(q)))
    loss.backward()
    return loss.item(), scores.grad.numpy()


NEW = Heads(((0, 1, 2), (3, 4)), (3, 4))
#: The second task brings class 1 back.
BACK = Heads(((0, 1, 2), (3, 4)), (1, 3, 4))


@pytest.mark.parametrize("heads", [NEW, BACK])
@pytest.mark.parametrize(("strength", "T"), [(1.0, 2.0), (0.3, 1.0), (3.0, 4.0)])
def test_cross_entropy_and_distillation_are_the_equations(heads, strength, T):
    q, y, old = drawn(0)
    found, gradient = of_ours(Distilled(heads, "seen", False, lambda _: torch.from_numpy(old), strength, T), q, y)
    assert found == pytest.approx(ce_kd(q, y, old, strength, T), rel=1e-12)
    np.testing.assert_allclose(gradient, gradient_of(lambda q: ce_kd(q, y, old, strength, T), q), atol=1e-8)


def test_distillation_by_hand():
    """q = (1, 0), q' = (0, 2), T = 2: -(0.268941 log 0.622459 + 0.731059 log 0.377541) = 0.839606."""
    q, old = np.array([[1.0, 0.0, -50.0]]), torch.tensor([[0.0, 2.0]], dtype=torch.float64)
    heads = Heads(((0, 1), (2,)), (2,))
    with_it, without = (
        of_ours(Distilled(heads, "seen", False, lambda _: old, s, 2.0), q, np.array([0]))[0] for s in (1, 0)
    )
    assert with_it - without == pytest.approx(0.839606, abs=5e-7)


@pytest.mark.parametrize("heads", [NEW, BACK])
@pytest.mark.parametrize("strength", [1.0, 0.25])
def test_binary_cross_entropy_is_icarls(heads, strength):
    q, y, old = drawn(1)
    found, gradient = of_ours(Binary(heads, False, lambda _: torch.from_numpy(old), strength), q, y)
    assert found == pytest.approx(bce(q, y, old, strength, heads.task), rel=1e-12)
    expected = gradient_of(lambda q: bce(q, y, old, strength, heads.task), q)
    np.testing.assert_allclose(gradient, expected, atol=1e-8)
    alone, _ = of_ours(Binary(heads, False, None, strength), q, y)
    assert alone == pytest.approx(bce(q, y, old[:, :0], 0, heads.task), rel=1e-12)
    if heads is NEW and strength == 1:
        # The label of an old class's exemplar says nothing then.
        other = np.where(y < 3, (y + 1) % 3, y)
        assert bce(q, other, old, 1, heads.task) == pytest.approx(found, rel=1e-12)


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("images")
@both
def test_without_memory_and_distillation_it_is_fedavg_bit_for_bit(trains):
    ours = learnt(fedicarl(memory=0, strength=0.0, trains=trains), trains)
    plain = learnt(FedAvg(training(), trains=trains, loss_classes="seen"), trains)
    assert not differing(state_of(ours.server), state_of(plain.server))
    assert ours.transport.state_dict() == {}
    sent = [[(r.round, r.stage, r.up_bytes, r.down_bytes) for r in f.state.ledger.uploads] for f in (ours, plain)]
    assert sent[0] == sent[1]


@pytest.mark.slow_cases("apart0-images", "apart1-images")
@both
@pytest.mark.parametrize("apart", [{"memory": 8, "strength": 0.0}, {"memory": 0, "strength": 1.0}])
def test_memory_and_distillation_each_change_the_model_but_not_the_first_tasks(trains, apart):
    ends = []
    for method in (fedicarl(trains=trains, **apart), FedAvg(training(), trains=trains, loss_classes="seen")):
        models: list = []
        learnt(method, trains, after=lambda done, models=models: models.append(state_of(done.server)))
        ends.append(models)
    ours, plain = ends
    assert not differing(ours[0], plain[0])
    assert differing(ours[1], plain[1])


@both
def test_with_room_for_everything_one_client_trains_on_what_centralised_has(trains, monkeypatch):
    sizes = [[13], [9], [12]]
    seen = trained_on(monkeypatch)
    method = fedicarl(memory=1000, strength=0.0, trains=trains)
    federation = learnt(method, trains, sizes)
    everything = tasks_on(trains, sizes)
    for task, _, _, inputs, labels in seen:
        so_far = [clients[0] for clients in everything[: task + 1]]
        assert rows(inputs) == rows(torch.cat([samples for samples, _ in so_far]))
        assert Counter(labels.tolist()) == Counter(torch.cat([own for _, own in so_far]).tolist())
        for column in labels.unique():
            mine = torch.cat([samples[own == column] for samples, own in so_far])
            assert rows(inputs[labels == column]) == rows(mine)
    assert len(seen) == 3 * 2
    uploads = [row for row in federation.state.ledger.uploads if row.stage == "model"]
    assert [row.samples for row in uploads] == [13, 13, 9, 9, 12, 12]
    if trains == "images":
        joint = learnt(Centralised(training(rounds=1)), trains, sizes)
        assert rows(joint.server.samples["images"]) == rows(seen[-1][3])


# The nearest mean -----------------------------------------------------------------------------------------------------


def pooled_means(federation) -> np.ndarray:
    """Of all clients' exemplars in one place, under the model as it is."""
    lists = [kept_by(federation, client) for client in range(CLIENTS)]
    columns = sorted({column for kept in lists for column in kept})
    pooled = [torch.cat([kept[column] for kept in lists if column in kept]) for column in columns]
    means = np.stack([plain_directions(federation, samples).mean(axis=0) for samples in pooled])
    return means / np.linalg.norm(means, axis=1, keepdims=True)


@pytest.mark.slow_cases("float16-images", "float32-images", "float64-images")
@both
@pytest.mark.parametrize("wire", ["float64", "float32", "float16"])
def test_the_sums_of_the_clients_make_the_mean_of_the_pooled_exemplars(trains, wire):
    """Of clients without samples of the task, too: they are asked in the stage `exemplars`."""
    close = {"float64": 1e-12, "float32": 1e-6, "float16": 2e-3}[wire]

    def after(federation):
        expected = pooled_means(federation)
        np.testing.assert_allclose(federation.server.means().numpy(), expected, atol=close)
        if wire != "float64":
            return
        inputs = torch.cat([samples for clients in tasks_on(trains) for samples, _ in clients])
        phi = plain_directions(federation, inputs)
        distances = np.linalg.norm(phi[:, None] - expected[None], axis=2)
        scores = federation.server.classify(TestBatch.of(inputs)).scores.numpy()
        np.testing.assert_allclose(scores, -distances, atol=1e-12)

    federation = learnt(fedicarl(trains=trains, classify="nme"), trains, after=after, wire=wire)
    asked = {
        (row.task, row.client) for row in federation.state.ledger.uploads if row.stage == EXEMPLARS and row.up_bytes
    }
    assert asked == {(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)}


def test_the_bytes_of_the_means_are_a_vector_and_two_numbers_for_each_class():
    federation = learnt(fedicarl(classify="nme"))
    d = federation.context.inputs
    had = {client: set() for client in range(CLIENTS)}
    for row in federation.state.ledger.uploads:
        if row.stage == EXEMPLARS:
            had[row.client] |= set(tasks_on("images")[row.task][row.client][1].tolist())
            assert row.up_bytes == (4 * d + 8) * len(had[row.client])
    # The teacher does not come again to those who are asked without samples of the task.
    model = sum(value.nbytes for value in federation.server.network.state().values())
    [asked] = [r for r in federation.state.ledger.uploads if (r.task, r.client, r.stage) == (2, 0, EXEMPLARS)]
    assert asked.down_bytes == model + 4 * 3


class Doubling(Middleware):
    """Sends the first class of every answer twice."""

    def send(self, message, client):
        if message.stage != EXEMPLARS:
            return message
        return message.with_tensors({name: torch.cat([value, value[:1]]) for name, value in message.items()})


def test_an_upload_that_names_a_class_twice_is_refused():
    method, transport = fedicarl(classify="nme", trains="features"), partial(InProcess.of, middleware=[Doubling()])
    federation = federation_of(method, context_on("features"), tasks_on("features"), transport=transport)
    with pytest.raises(UserError, match="classes names something twice"):
        federation.run(lambda _: None)


def test_with_softmax_only_those_with_samples_are_asked():
    federation = learnt(fedicarl())
    asked = {(r.task, r.client) for r in federation.state.ledger.uploads if r.stage == EXEMPLARS and r.down_bytes}
    assert asked == {(t, k) for t, sizes in enumerate(SIZES) for k, size in enumerate(sizes) if size}


@pytest.mark.parametrize("scale", [0.25, 3.7, 1e-3])
def test_the_nearest_mean_does_not_depend_on_the_scale_of_features(scale):
    """With weights that training leaves where they are, features are the inputs."""
    method = fedicarl(trains="features", classify="nme", training=training(lr=1e-9), strength=0.0)
    tasks = tasks_on("features")
    scaled = [[(samples * scale, labels) for samples, labels in clients] for clients in tasks]
    inputs = torch.cat([samples for clients in tasks for samples, _ in clients])
    found = []
    for data, factor in ((tasks, 1.0), (scaled, scale)):
        federation = federation_of(method, context_on("features"), data)
        federation.run(lambda _: None)
        found.append(federation.server.classify(TestBatch.of(inputs * factor)).scores)
    torch.testing.assert_close(*found, atol=1e-6, rtol=0)
    assert torch.equal(found[0].argmax(dim=1), found[1].argmax(dim=1))


def test_classes_without_an_exemplar_are_told_and_never_named(caplog):
    # Client 2 has an image of each of its two classes; the others have had more classes than they may keep images.
    sizes = [[14, 9, 0], [12, 8, 0], [0, 8, 9]]
    federation = learnt(fedicarl(classify="nme", memory=3), sizes=sizes)
    assert len([record for record in caplog.records if "no client keeps an exemplar of 4 of 4" in record.message]) == 1
    without = federation.server.counts == 0
    assert without.tolist() == [True] * 4 + [False] * 2
    inputs = torch.cat([samples for clients in tasks_on("images", sizes) for samples, _ in clients])
    scores = federation.server.classify(TestBatch.of(inputs)).scores
    assert not without[scores.argmax(dim=1)].any()


# Knobs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"loss_classes": "task"}, "method.loss_classes=task"),
        ({"loss": "bce", "strength": 1.5}, "method.strength=1.5"),
        ({"memory": 0, "classify": "nme"}, "method.memory=0"),
        ({"ccvr": "gaussian", "classify": "nme"}, "method.ccvr=gaussian"),
        ({"variant": "published", "classify": "nme"}, "method.classify=nme"),
        ({"variant": "published", "loss": "bce"}, "method.loss=bce"),
        ({"variant": "published"}, "method.training.weighting=samples"),
    ],
)
def test_knobs_that_contradict_each_other_are_told(knobs, told):
    with pytest.raises(UserError, match=told):
        fedicarl(**knobs)


@pytest.mark.slow
def test_nearest_means_are_only_asked_once_a_task_is_over(tmp_path):
    knobs = ("method.memory=20", "method.classify=nme", "evaluate_rounds=1")
    run = run_in(tmp_path, *short_run("fedicarl"), *knobs, "data=digits", "tasks=2", "clients=2")
    tested = (run.folder / "rounds.csv").read_text().splitlines()[1:]
    assert [line.split(",")[0] for line in tested] == ["0", "1"]
    assert run.record["rounds"]["best"] == run.record["metrics"]["accuracy"]
