"""GLFC's proxy server: what goes up and down, what it reconstructs, and which models it chooses."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from fcl_bench.engine.codec import Middleware
from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.validation import BadUpload
from fcl_bench.methods.exemplars import proxy as module
from fcl_bench.methods.exemplars.glfc import GLFCClient
from fcl_bench.methods.exemplars.inversion import GradientEncoder
from fcl_bench.methods.exemplars.proxy import GRADIENTS, Inversion, ProxyServer
from tests.methods.glfc_harness import (
    QUICK,
    SIZES,
    glfc,
    learnt,
    made,
    quickly,
    short_descent,
    tasks_of,
    training,
    turns,
)
from tests.methods.training_harness import federation_of, tiny_context
from tests.methods.whole_runs import model_of, same

__all__ = ["short_descent"]

#: Numbers of the encoder's gradient with 8 x 8 pixels and C classes: 3 convolutions, and 12 x 2 x 2 features.
NUMBERS = {columns: 912 + 2 * 3612 + 49 * columns for columns in (2, 4, 6)}


def classes_of(task: int, client: int) -> list[int]:
    return tasks_of()[task][client][1].unique().tolist()


def model_rows(federation):
    return [row for row in federation.state.ledger.uploads if row.stage == "model" and row.labelled]


# What travels ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("float16-2", "float32-4", "float64-8")
@pytest.mark.parametrize(("wire", "number"), [("float32", 4), ("float64", 8), ("float16", 2)])
@quickly
def test_gradients_go_up_with_the_signal_and_the_best_model_down_once(wire, number):
    federation = learnt(glfc(), wire=wire)
    body = sum(v.numel() for name, v in model_of(federation).items() if name.startswith("body."))
    plain = learnt(glfc(proxy="none"), wire=wire)
    for row, without in zip(model_rows(federation), model_rows(plain), strict=True):
        columns, own = 2 * (row.task + 1), len(classes_of(row.task, row.client))
        scales = 4 * own if wire == "float16" else 0
        sent = number * NUMBERS[columns] * own + scales if not row.round else 0
        assert row.up_bytes == without.up_bytes + sent
        # The encoder's seed comes once, and the best model in place of the last.
        new = not row.round and not any(SIZES[t][row.client] for t in range(row.task))
        assert row.down_bytes == without.down_bytes + (8 if new else 0)
        once = 4 * (body + 33 * 2 * row.task) if row.task and not row.round else 0
        assert row.down_bytes == 4 * (body + 33 * columns) + once + 16 + 4 * (row.task + 1) + (8 if new else 0)


@quickly
def test_a_client_without_a_signal_sends_no_gradient(monkeypatch):
    federation = learnt(glfc(signal="entropy", rise=100.0))
    assert federation.server.received == 0
    assert len(federation.server.labels) == 0
    assert federation.server.pictures() == {}
    assert federation.server.privacy() == {"sample_gradients": 0, "reconstructed_images": 0}
    plain = learnt(glfc(signal="entropy", rise=100.0, proxy="none"))
    # With nothing to choose by, the last model is the old one.
    assert same(model_of(federation), model_of(plain))


class Wrong(Middleware):
    def send(self, message, client):
        if GRADIENTS not in message:
            return message
        return message.with_tensors({**message, GRADIENTS: message[GRADIENTS][:-1]})


@quickly
def test_gradients_of_another_encoder_are_refused():
    transport = partial(InProcess.of, middleware=[Wrong()])
    federation = federation_of(glfc(), tiny_context(), tasks_of(), transport=transport)
    with pytest.raises(BadUpload, match=rf"gradients has the shape .* \({NUMBERS[2]}, classes\)"):
        federation.run(lambda _: None)


# What it reconstructs -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@quickly
def test_classes_are_read_off_exactly_and_privacy_counts_every_gradient():
    federation = learnt(glfc())
    server, expected = federation.server, Counter()
    for client, size in enumerate(SIZES[2]):
        expected.update(dict.fromkeys(classes_of(2, client), QUICK.images) if size else {})
    assert Counter(server.labels.tolist()) == expected
    gradients = sum(len(classes_of(t, k)) for t, sizes in enumerate(SIZES) for k, size in enumerate(sizes) if size)
    assert server.privacy() == {"sample_gradients": gradients, "reconstructed_images": gradients}
    [picture] = server.pictures().values()
    assert list(server.pictures()) == ["reconstructed"]
    assert len(picture.images) == len(picture.labels) == gradients
    assert picture.tasks.tolist() == sorted(picture.tasks.tolist())
    for task in range(3):
        assert Counter(picture.labels[picture.tasks == task].tolist()) == Counter(
            label for k, size in enumerate(SIZES[task]) if size for label in classes_of(task, k)
        )


@pytest.mark.slow
def test_what_is_not_perturbed_is_reconstructed_to_the_grey_level():
    """The server sees a client's own image: the one nearest to its class's mean under the client's model."""
    inversion = Inversion(perturbation=0, iterations=60, images=1)
    federation = learnt(glfc(inversion=inversion, training=training(rounds=1)), [[12]])
    images, labels = tasks_of([[12]])[0][0]
    shown = federation.server.pictures()["reconstructed"]
    assert shown.labels.tolist() == [0, 1]
    # With one client the average is its model, under which it chose.
    phi = federation.server.embed(images).double().numpy()
    phi /= np.linalg.norm(phi, axis=1, keepdims=True)
    for image, column in zip(shown.images, (0, 1), strict=True):
        mine = np.flatnonzero((labels == column).numpy())
        nearest = mine[np.linalg.norm(phi[mine] - phi[mine].mean(axis=0), axis=1).argmin()]
        assert (image.int() - images[nearest].int()).abs().float().mean() < 1


@quickly
def test_the_encoder_follows_from_the_seed_and_never_travels():
    first, second = (made(glfc(), seed=seed).server for seed in (0, 1))
    tasks = made(glfc()).stream.tasks
    for server in (first, second):
        server.start_task(tasks[0])
    assert first.encoder.numbers == NUMBERS[2]
    images, labels = torch.rand(3, 3, 8, 8), torch.tensor([0, 1, 1])
    again = GradientEncoder((8, 8), 2, int(first.broadcast(tasks[0], 0)["encoder"]))
    assert torch.equal(first.encoder.gradients(images, labels), again.gradients(images, labels))
    assert not torch.equal(first.encoder.gradients(images, labels), second.encoder.gradients(images, labels))


# Which models it chooses ----------------------------------------------------------------------------------------------


def told_accuracies(monkeypatch, values: dict[tuple[int, int], float]) -> None:
    """What the monitor says of the model at the end of (task, round)."""
    monkeypatch.setattr(ProxyServer, "accuracy", lambda server: values[server.task, server._round])


def models_by_round(federation) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    """Run; the average of each (task, round)."""
    found: dict = {}
    step = ProxyServer.server_step

    def noted(server):
        step(server)
        found[server.task, server._round] = {n: v.clone() for n, v in server.network.state().items()}

    ProxyServer.server_step = noted
    try:
        federation.run(lambda _: None)
    finally:
        ProxyServer.server_step = step
    return found


@pytest.mark.slow
@quickly
def test_the_old_model_is_the_best_of_the_last_task(monkeypatch):
    """The later of equals, and from nothing in each task."""
    accuracies = [0.2, 0.9, 0.9, 0.5], [0.4, 0.3, 0.1, 0.2], [0.0] * 4
    told_accuracies(monkeypatch, {(t, r): a for t, row in enumerate(accuracies) for r, a in enumerate(row)})
    seen = turns(monkeypatch)
    models = models_by_round(made(glfc(training=training(rounds=4))))
    best = {1: (0, 2), 2: (1, 0)}
    for turn in seen:
        task = turn["at"][0]
        assert (turn["old"] is None) == (task == 0)
        if task:
            assert same(turn["old"], models[best[task]])


@quickly
def test_gradients_that_come_late_add_to_the_monitor_and_the_best_has_to_win_again(monkeypatch):
    """With half of the clients in each round."""
    reached, rounds, step = [], 4, ProxyServer.server_step
    # More images are harder: what was reached on fewer would never be reached again.
    monkeypatch.setattr(ProxyServer, "accuracy", lambda server: 1 / len(server.labels))

    def noted(server):
        step(server)
        new = same(server.best.best, dict(server.network.state()))
        reached.append((server.best.performance, 1 / len(server.labels), new))

    monkeypatch.setattr(ProxyServer, "server_step", noted)
    knobs, sizes = training(rounds=rounds, fraction=0.4), []
    federation = learnt(glfc(training=knobs), after=lambda done: sizes.append(len(done.server.labels)))
    came = {(row.task, row.client) for row in model_rows(federation) if row.up_bytes}
    gradients = [sum(len(classes_of(task, client)) for t, client in came if t == task) for task in range(3)]
    assert sizes == [QUICK.images * count for count in gradients]
    assert all(kept == told for kept, told, _ in reached)
    assert [new for *_, new in reached] == [True] * 3 * rounds


@pytest.mark.slow
@quickly
def test_the_choice_changes_what_clients_learn():
    """An old model of the task's first round is not that of its last."""
    rounds = training(rounds=3)

    def run(first: bool):
        accuracy = ProxyServer.accuracy
        ProxyServer.accuracy = lambda server: float(server._round == 0) if first else 1.0
        try:
            return model_of(learnt(glfc(training=rounds)))
        finally:
            ProxyServer.accuracy = accuracy

    last = model_of(learnt(glfc(training=rounds, proxy="none")))
    assert same(run(first=False), last)
    assert not same(run(first=True), last)


# Resume, other settings -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@quickly
def test_the_seed_decides():
    def run(seed: int):
        return learnt(glfc(), seed=seed).server.state_dict()

    first, again, other = run(0), run(0), run(1)
    assert same(first, again)
    assert not torch.equal(first["images"], other["images"])


@pytest.mark.slow_cases("bfloat16", "float16")
@pytest.mark.parametrize("wire", ["float16", "bfloat16", "float64"])
@quickly
def test_any_wire_carries_the_labels(wire):
    federation = learnt(glfc(), wire=wire)
    assert set(federation.server.labels.tolist()) == {4, 5}


@quickly
def test_the_network_is_as_it_was_after_the_prototypes(monkeypatch):
    """What is uploaded was copied before; the perturbation changes no weight and leaves no gradient behind."""
    seen, gradients = [], GLFCClient.gradients

    def noted(self, client_data, broadcast, columns):
        before = {name: value.clone() for name, value in self.network.state_dict().items()}
        found = gradients(self, client_data, broadcast, columns)
        seen.append(same(before, dict(self.network.state_dict())))
        return found

    monkeypatch.setattr(GLFCClient, "gradients", noted)
    learnt(glfc())
    assert len(seen) == 7
    assert all(seen)


@quickly
def test_prototypes_are_perturbed_as_the_network_sees_images(monkeypatch):
    compared, original = [], module.perturbed

    def noted(images, targets, scores, steps, rate, weight_decay):
        [client] = [cell.cell_contents for cell in scores.__closure__ if hasattr(cell.cell_contents, "network")]
        with torch.no_grad():
            seen = [torch.equal(scores(images), client.network(own)) for own in ((images - 0.5) / 0.5, images)]
        compared.append(tuple(seen))
        assert 0 <= images.min() < images.max() <= 1
        assert (steps, rate, weight_decay) == (QUICK.perturbation, pytest.approx(0.03), 1e-5)
        return original(images, targets, scores, steps, rate, weight_decay)

    monkeypatch.setattr(module, "perturbed", noted)
    learnt(glfc())
    assert compared
    assert set(compared) == {(True, False)}
