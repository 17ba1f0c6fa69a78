"""`ccvr=gaussian` in whole runs: what it changes and leaves, messages, interruptions, what it is worth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.centralised import Centralised
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.distillation.fedlwf import FedLwF
from fcl_bench.methods.gradient.client import MOMENTS
from fcl_bench.protocol.context import TestBatch
from fcl_bench.training.knobs import Gaussian, Training
from fcl_bench.typed import typed_instance
from tests.methods.training_harness import feature_tasks, federation_of, image_tasks, tiny_context
from tests.methods.whole_runs import feature_context, learnt, model_of, same
from tests.small_methods import NAMES, architecture, class_of, made, trains_by_gradient

SIZES = [[9, 6, 0], [8, 1, 7], [6, 6, 6]]


def training(**knobs) -> Training:
    return Training(**{"rounds": 2, "epochs": 1, "batch_size": 4, "lr": 0.05, **knobs})


SMALL = [name for name in NAMES if trains_by_gradient(name) and name != "centralised" and architecture(name) == "conv"]


@pytest.mark.slow_cases(
    "feddyn", "fedewc", "fedicarl", "fedprotip", "fot", "glfc", "lander", "lga", "mfcl", "moon", "scaffold", "target"
)
@pytest.mark.parametrize("name", SMALL)
def test_it_changes_predictions_of_every_method_and_nothing_of_its_training(name):
    tasks = image_tasks(np.random.default_rng(0), [2, 2], [[9, 6, 0], [8, 1, 7]])
    models, ways = {}, {}
    for way in ("none", "gaussian"):
        own = {"classify": "softmax"} if name == "fedicarl" else {}
        method = made(name, training=training(rounds=1), ccvr=way, gaussian=Gaussian(samples=20, lr=0.1), **own)
        federation = learnt(method, tiny_context(), tasks)
        models[way] = model_of(federation)
        ways[way] = federation
        stages = {row.stage for row in federation.state.ledger.uploads}
        assert (MOMENTS in stages) == (way == "gaussian")
        names = federation.server.state_dict()
        assert any(own.startswith("replay.seconds.") for own in names) == (way == "gaussian")
    assert same(models["none"], models["gaussian"])
    heads = [ways[way].server.model()["W"] for way in ("none", "gaussian")]
    assert heads[0].shape == heads[1].shape
    assert not torch.equal(*heads)
    server = ways["gaussian"].server
    images = torch.cat([images for images, _ in tasks[1]])
    features = server.embed(images)
    scores = features @ server.model()["W"] + server.model()["bias"]
    torch.testing.assert_close(server.logits(features), scores)


def test_its_stage_has_the_bytes_of_the_formulas():
    tasks, d, c = feature_tasks(0, [2, 2, 2], SIZES), 6, 2
    for covariance in ("full", "diagonal"):
        method = FedAvg(training(), trains="features", ccvr="gaussian", gaussian=Gaussian(covariance))
        federation = learnt(method, feature_context(), tasks)
        rows = [row for row in federation.state.ledger.uploads if row.stage == MOMENTS and row.up_bytes]
        assert len(rows) == 8
        for row in rows:
            labels = tasks[row.task][row.client][1]
            told = int((np.bincount(labels.numpy() - 2 * row.task, minlength=2) > 1).sum())
            square = d * d * told if covariance == "full" else d * c
            assert row.up_bytes == 4 * (c + d * c + square)


def test_its_stage_sends_nothing_but_the_model_to_clients_that_did_not_train():
    """Half of the clients train in a round; everyone is asked for moments, and no teacher goes with it."""
    tasks, sent = feature_tasks(0, [2, 2, 2], [[9, 6, 5, 7], [8, 4, 7, 6], [6, 6, 6, 6]]), []
    for kind in (FedAvg, FedLwF):
        method = kind(training(rounds=1, fraction=0.5), trains="features", ccvr="gaussian", loss_classes="task")
        rows = learnt(method, feature_context(), tasks).state.ledger.uploads
        sent.append([row.down_bytes for row in rows if row.stage == MOMENTS])
    assert sent[0] == sent[1]


def test_a_new_task_predicts_by_its_trained_heads_until_its_moments_are_in():
    tasks = feature_tasks(0, [2, 2], SIZES[:2])
    method = FedAvg(training(rounds=3), trains="features", ccvr="gaussian")
    federation, shapes = federation_of(method, feature_context(), tasks), []

    def look(done):
        weight = done.server.replay.weight
        shapes.append((done.state.tasks_done, done.state.rounds_done, None if weight is None else len(weight)))
        assert done.server.model()["W"].shape[1] == 2 * len(done.server.tasks)

    federation.run(look, every=1)
    assert shapes == [
        (0, 1, None),
        (0, 2, None),
        (0, 3, None),
        (1, 0, 2),
        (1, 1, None),
        (1, 2, None),
        (1, 3, None),
        (2, 0, 4),
    ]


@pytest.mark.parametrize("name", ["fedavg", "fedprotip"])
def test_a_class_that_comes_back_is_pooled_with_what_was_known_of_it(name):
    """FedProTIP gives it a second logit, of which the larger counts."""
    tasks = image_tasks(np.random.default_rng(1), [3, 2], [[12, 9], [10, 8]])
    # Class 2 comes back: the second task's first class is the first task's last.
    second = [(images, labels - 1) for images, labels in tasks[1]]
    method = class_of(name)(training=training(), ccvr="gaussian")
    server = learnt(method, tiny_context(), [tasks[0], second]).server
    labels = torch.cat([labels for task in (tasks[0], second) for _, labels in task])
    assert [server.replay.known[column].count for column in range(4)] == torch.bincount(labels).tolist()
    assert len(server.replay.weight) == (5 if name == "fedprotip" else 4)
    assert server.predict(tasks[0][0][0]).shape[1] == 4


@pytest.mark.slow
def test_stale_features_are_told_once_and_fixed_ones_are_not(caplog):
    tasks = image_tasks(np.random.default_rng(0), [2, 2, 2], SIZES)
    learnt(FedAvg(training(), ccvr="gaussian"), tiny_context(), tasks)
    [told] = [record.message for record in caplog.records]
    assert told.startswith("method.ccvr=gaussian: the features train")
    caplog.clear()
    method = FedAvg(training(), trains="features", ccvr="gaussian")
    learnt(method, feature_context(), feature_tasks(0, [2, 2, 2], SIZES))
    assert caplog.records == []


def test_what_is_impossible_is_refused_with_its_key():
    with pytest.raises(UserError, match=r"^method\.ccvr=gaussian has no meaning with all data in one place"):
        Centralised(ccvr="gaussian")
    for knobs, told in (
        ({"ccvr": "gauss"}, r"method\.ccvr=gauss is not known \(did you mean gaussian"),
        ({"gaussian": {"covariance": "low"}}, r"method\.gaussian\.covariance=low is not known"),
        ({"gaussian": {"lr": 0}}, r"method\.gaussian\.lr=0\.0 is out of range"),
        ({"gaussian": {"least": 0}}, r"method\.gaussian\.least=0 is out of range"),
    ):
        with pytest.raises(UserError, match=told):
            typed_instance(FedAvg, knobs, "method")


def test_covariances_that_no_memory_holds_are_refused_before_any_work():
    method = FedAvg(training(), trains="features", ccvr="gaussian")
    with pytest.raises(UserError, match=r"^method\.gaussian\.covariance=full needs 7\.45e\+08 GiB for the covariances"):
        method.check(feature_context(10**7), [600, 400])
    FedAvg(training(), trains="features", ccvr="gaussian", gaussian=Gaussian("diagonal")).check(
        feature_context(10**7), [1000]
    )


@pytest.mark.slow_cases("0", "1", "2")
@pytest.mark.parametrize("seed", range(3))
def test_on_a_skewed_stream_of_digits_it_is_clearly_better_than_the_trained_head(seed):
    """10 classes in 5 tasks, each class with two clients of four: the trained head knows the last task only."""
    Z, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(y))
    Z, y = Z[order] / 16, rng.permutation(10)[y[order]]
    test, train = slice(0, 500), slice(500, None)
    tasks = []
    for task in range(5):
        clients = []
        for client in range(4):
            of_class = y[train] == 2 * task + client % 2
            own = np.flatnonzero(of_class & (np.arange(len(of_class)) % 2 == client // 2))
            clients.append((torch.from_numpy(Z[train][own]), torch.from_numpy(y[train][own])))
        tasks.append(clients)
    method = FedAvg(training(rounds=5, lr=0.1, batch_size=16), loss_classes="seen", trains="features", ccvr="gaussian")
    federation = learnt(method, feature_context(64, seed=seed), tasks)

    def accuracy() -> float:
        scores = federation.server.classify(TestBatch.of(torch.from_numpy(Z[test]))).scores
        return float((scores.argmax(dim=1).numpy() == y[test]).mean())

    calibrated = accuracy()
    federation.server.replay.weight = None
    assert calibrated > 0.8
    assert calibrated > accuracy() + 0.4
