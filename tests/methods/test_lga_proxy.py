"""LGA's proxy server: the radius from clients' sums, which model it picks, and what it tells."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.engine.validation import first_objection
from fcl_bench.methods.exemplars.lga import LGA, RADIUS, LGAServer, augmented_features
from fcl_bench.methods.exemplars.proxy import Inversion
from fcl_bench.protocol.context import Task
from fcl_bench.protocol.message import Message
from tests.methods import lga_oracle
from tests.methods.fedicarl_harness import CLASSES, SIZES, context_on, learnt, made, tasks_on, training
from tests.methods.glfc_harness import short_descent
from tests.methods.plain_training import state_of
from tests.methods.training_harness import federation_of, image_shard, images_stream, learn_image_task
from tests.methods.whole_runs import same

__all__ = ["short_descent"]
pytestmark = pytest.mark.usefixtures("short_descent")


def proxied(**knobs) -> LGA:
    """Of a second: a single look at every reconstructed image."""
    few = {"training": training(), "memory": 8, "inversion": Inversion(2, 1, images=1), "proxy_init": 0}
    return LGA(**{**few, **knobs})


# The radius -----------------------------------------------------------------------------------------------------------


def test_the_radius_is_that_of_all_clients_samples_together():
    """The first task's, under its last model, against numpy.cov of everyone's features."""
    found = []

    def after(federation):
        if federation.state.tasks_done == 1:
            images = torch.cat([images for images, _ in tasks_on("images")[0]])
            found.append(federation.server.embed(images).double().numpy())

    server = learnt(proxied(radius=0.15), "images", SIZES[:2], after=after).server
    labels = np.concatenate([labels.numpy() for _, labels in tasks_on("images")[0]])
    expected = lga_oracle.radius([found[0][labels == column] for column in np.unique(labels)])
    assert server.radius == pytest.approx(expected, rel=1e-4)
    assert server.report()["radius"] == server.radius


def test_where_nobody_has_samples_in_the_first_task_the_next_one_is_asked():
    """The radius stayed at its first value."""
    unlabelled = [(0, client) for client in range(len(SIZES[0]))]
    federation = federation_of(proxied(), context_on("images"), tasks_on("images", SIZES[:2]), unlabelled=unlabelled)
    federation.run(lambda _: None)
    assert federation.server.radius != 0.15
    asked = {row.task for row in federation.state.ledger.uploads if row.stage == RADIUS and row.up_bytes}
    assert asked == {1}
    again = made(proxied(), "images", SIZES[:2]).server
    again.load_state_dict(federation.server.state_dict())
    assert again.radius == federation.server.radius
    assert [RADIUS in again.stages(task) for task in federation.stream.tasks] == [True, True]


@pytest.mark.parametrize("wire", ["float64", "float32"])
def test_the_sums_cost_4_2_d_and_1_bytes_per_class_and_client(wire):
    federation = learnt(proxied(), "images", SIZES[:2], wire=wire)
    rows = [row for row in federation.state.ledger.uploads if row.stage == RADIUS and row.up_bytes]
    number, d = {"float64": 8, "float32": 4}[wire], federation.server.start.dimension
    assert [(row.task, row.client) for row in rows] == [(0, 0), (0, 1)]
    assert {row.up_bytes for row in rows} == {CLASSES[0] * (4 + 2 * number * d)}


def test_sums_that_contradict_themselves_are_refused():
    server = learnt(proxied(), "images", SIZES[:1]).server
    d = server.start.dimension
    told = {"counts": torch.tensor([0, 2]), "sums": torch.zeros(d, 2), "squares": torch.ones(d, 2)}
    schema = server.schema(Task(0, range(2), 2), RADIUS)
    assert first_objection(told, schema)[0] == "squares"
    assert first_objection({**told, "counts": torch.tensor([1, 2])}, schema) is None


def test_the_server_needs_nothing_but_the_sum_over_clients_and_the_classes_that_they_hold():
    """What travels in the stage may be added up on the way, and leaves out other classes under wire.columns=held."""
    method, context, tasks = proxied(), context_on("images"), tasks_on("images", SIZES[:1])
    server, client, told = method.server(context), method.client(context), []
    [task] = images_stream(tasks)
    learn_image_task(method, context, server, task, tasks[0])
    broadcast = server.broadcast(task, server.stages(task).index(RADIUS))
    for k, (images, labels) in enumerate(tasks[0]):
        if len(labels):
            upload, _ = client.update(image_shard(k, 0, images, labels), broadcast, {})
            assert upload.keys() == {"counts", "sums", "squares"}
            told.append(upload)
    radius = server.radius
    together = Message({name: sum(upload[name] for upload in told) for name in told[0]})
    server.absorb_answer(0, together)
    server.finish_stage()
    assert server.radius == pytest.approx(radius, rel=1e-5)


# The choice -----------------------------------------------------------------------------------------------------------

SCRIPT = [[0.9, 0.5, 0.7], [0.6, 0.8, 0.2], [0.3, 0.1, 0.2]]


@pytest.mark.slow_cases("1", "3")
@pytest.mark.parametrize("proxy_init", [0, 1, 3])
def test_the_old_model_is_the_best_of_the_last_task(monkeypatch, proxy_init):
    """By performances that are made up: which of the models after each round each task's clients are held to."""
    models, teachers, step = {}, {}, LGAServer.server_step

    def stepped(self):
        models[f"{self.task}.{self._round}"] = state_of(self)
        step(self)
        teachers[self.task] = {name.split(".", 2)[2]: value for name, value in self._teacher.items()}

    monkeypatch.setattr(LGAServer, "accuracy_around", lambda self: SCRIPT[self.task][self._round])
    monkeypatch.setattr(LGAServer, "server_step", stepped)
    learnt(proxied(training=training(rounds=3), proxy_init=proxy_init))
    expected = lga_oracle.best_models(SCRIPT, proxy_init)
    assert teachers[0] == {}
    for task in (1, 2):
        assert same(teachers[task], models[expected[3 * task][0]])


def test_gradients_that_come_late_in_first_rounds_leave_the_bar_at_0(monkeypatch):
    bars, step = {}, LGAServer.server_step
    monkeypatch.setattr(LGAServer, "accuracy_around", lambda self: 0.9 if self.task == 0 else 0.4)

    def stepped(self):
        before = len(self.labels) if self.monitored == self.task else 0
        step(self)
        if 0 < before < len(self.labels):
            bars[self.task, self._round] = self.best.performance

    monkeypatch.setattr(LGAServer, "server_step", stepped)
    learnt(proxied(training=training(rounds=4, fraction=0.4), proxy_init=3))
    late = {round_: bar for (task, round_), bar in bars.items() if task > 0 and round_ < 3}
    assert late
    assert set(late.values()) == {0.0}


def test_the_best_models_by_hand():
    """The first task's is .9, the second's .8, the third's .3."""
    found = lga_oracle.best_models(SCRIPT, 0)
    assert [found[i] for i in (0, 3, 6, 8)] == [(None, "0.0"), ("0.0", "1.0"), ("1.1", "2.0"), ("1.1", "2.0")]
    # Rounds that count as 0: the last of them is the best until a later one is above 0.
    assert lga_oracle.best_models(SCRIPT, 2)[1:4] == [(None, "0.1"), (None, "0.2"), ("0.2", "1.0")]


def test_without_noise_the_accuracy_is_that_of_the_monitor_images():
    method = proxied(training=training(augment="none"), inversion=Inversion(2, 3, images=2))
    server = learnt(method, "images", SIZES[:2]).server
    assert len(server.labels) == 2 * 4  # two images of each of two clients' two classes
    predicted = server.predict(server.images).argmax(dim=1)
    server.radius = 0.0
    assert server.accuracy_around() == float((predicted == server.labels).double().mean())


@pytest.mark.slow
def test_noise_around_the_features_is_the_monitors(monkeypatch):
    """Radius and labels reach it, five features per image are counted, and seeds differ by round."""
    asked = []

    def augmented(features, labels, radius, seed):
        asked.append((features.shape, radius, seed))
        return augmented_features(features, labels, radius, seed)

    monkeypatch.setattr("fcl_bench.methods.exemplars.lga.augmented_features", augmented)
    server = learnt(proxied(radius=0.2), "images", SIZES[:2]).server
    assert [radius for _, radius, _ in asked] == [0.2] * 2 + [server.radius] * 2
    assert len({seed for _, _, seed in asked}) == 4
    assert {shape[1] for shape, *_ in asked} == {server.start.dimension}


def test_without_a_proxy_server_nobody_sends_sums_or_gradients():
    federation = learnt(proxied(proxy="none"), "images")
    assert {row.stage for row in federation.state.ledger.uploads} == {"model", "exemplars"}
    assert federation.server.privacy() == {}


@pytest.mark.slow
def test_what_the_server_came_to_know_is_told():
    """One gradient per client and class of every task."""
    server = learnt(proxied(), "images").server
    told = sum(len(labels.unique()) for clients in tasks_on("images") for _, labels in clients)
    assert server.privacy() == {"sample_gradients": told, "reconstructed_images": told}
    assert set(server.pictures()) == {"reconstructed"}
