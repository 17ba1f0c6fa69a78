"""`replay_head=gaussian`: pooled moments, drawn features, the retrained head against plain NumPy, what it leaves."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fcl_bench.config import typed_instance
from fcl_bench.data.images.batches import epoch_batches
from fcl_bench.engine.codec import decoded, encoded
from fcl_bench.errors import UserError
from fcl_bench.linalg.moments import Moments
from fcl_bench.methods.gradient.finetune import FineTune
from fcl_bench.methods.gradient.joint_training import JointTraining
from fcl_bench.methods.gradient.replay_head import MOMENTS, Gaussian, ReplayHead, moments_message
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.problem import TestBatch
from fcl_bench.protocol.wire import WIRE_DTYPES, WireFormat
from fcl_bench.training.heads import Heads
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Network, feature_start
from tests.methods.training_harness import CPU, feature_tasks, federation_of, image_tasks, tiny_problem
from tests.small_methods import NAMES, class_of, trains
from tests.small_runs import interrupted_in, run_in

SIZES = [[9, 6, 0], [8, 1, 7], [6, 6, 6]]


def training(**knobs) -> Training:
    return Training(**{"rounds": 2, "epochs": 1, "batch_size": 4, "lr": 0.05, **knobs})


def feature_problem(inputs: int = 6, **options):
    return dataclasses.replace(tiny_problem(**options), inputs=inputs, network=None)


def model_of(federation) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in federation.server.network.state().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def pooled(parts, knobs: Gaussian, columns=(0, 1, 2), wire: str = "float64", form: str = "full") -> ReplayHead:
    """The server's side after the uploads of clients with these (features, labels), over the wire."""
    head = ReplayHead(knobs, parts[0][0].shape[1], CPU)
    for Z, labels in parts:
        message = moments_message(torch.from_numpy(Z), torch.from_numpy(labels), columns, knobs)
        columns_sent = "held" if form == "packed" else "task"
        sent = encoded(message, WireFormat(WIRE_DTYPES[wire], gram=form, columns=columns_sent))
        received = decoded(sent, torch.float64, CPU)
        assert head.objection(received, columns) == ""
        head.absorb(received, columns)
    return head


# The moments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("seed", range(4))
def test_the_pooled_moments_are_those_of_the_pooled_samples_for_any_partition(covariance, seed):
    rng = np.random.default_rng(seed)
    Z, labels = rng.standard_normal((60, 4)) @ rng.standard_normal((4, 4)) + 2, rng.integers(0, 3, 60)
    owner = rng.integers(0, 7, 60)  # some clients hold a single sample of a class
    parts = [(Z[owner == k], labels[owner == k]) for k in range(7)]
    head = pooled(parts, Gaussian(covariance, least=1))
    for column in range(3):
        own = Z[labels == column]
        expected = np.cov(own.T)
        found = head.known[column]
        assert found.count == len(own)
        np.testing.assert_allclose(found.mean.numpy(), own.mean(axis=0), atol=1e-12)
        wanted = expected if covariance == "full" else np.diag(expected)
        np.testing.assert_allclose(found.covariance.numpy(), wanted, atol=1e-11)


def test_it_is_the_pooled_gaussian_of_the_paper_and_no_mixture():
    """Luo et al.: S = sum_k (n_k - 1) S_k / (n - 1) + sum_k n_k m_k m_k' / (n - 1) - n m m' / (n - 1)."""
    rng = np.random.default_rng(5)
    parts = [
        (rng.standard_normal((n, 3)) + shift, np.zeros(n, dtype=np.int64)) for n, shift in ((5, 0), (9, 4), (2, -3))
    ]
    sizes, means = np.array([5, 9, 2]), np.stack([Z.mean(axis=0) for Z, _ in parts])
    n, mean = sizes.sum(), sizes @ means / sizes.sum()
    within = sum((size - 1) * np.cov(Z.T) for size, (Z, _) in zip(sizes, parts, strict=True))
    between = sum(size * np.outer(m, m) for size, m in zip(sizes, means, strict=True)) - n * np.outer(mean, mean)
    found = pooled(parts, Gaussian(), columns=(0,)).known[0]
    np.testing.assert_allclose(found.mean.numpy(), mean, atol=1e-12)
    np.testing.assert_allclose(found.covariance.numpy(), (within + between) / (n - 1), atol=1e-12)


def test_a_client_is_silent_of_classes_of_which_it_has_fewer_samples_than_asked():
    rng = np.random.default_rng(1)
    Z, labels = rng.standard_normal((6, 3)), np.array([0, 0, 0, 1, 2, 2])
    message = moments_message(torch.from_numpy(Z), torch.from_numpy(labels), (0, 1, 2), Gaussian())
    assert message["counts"].tolist() == [3, 0, 2]
    assert not message["sums"][:, 1].any()
    assert sorted(name for name in message if name.startswith("second")) == ["second.0", "second.2"]
    head = pooled([(Z, labels)], Gaussian())
    assert sorted(head.known) == [0, 2]
    assert sorted(pooled([(Z, labels)], Gaussian(least=3)).known) == [0]


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", ["full", "packed"])
@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_moments_come_through_every_wire(wire, form, covariance):
    rng = np.random.default_rng(2)
    parts = [(rng.standard_normal((40, 5)).clip(0) + 0.2, np.arange(40) % 2) for _ in range(3)]
    exact = pooled(parts, Gaussian(covariance), (0, 1))
    found = pooled(parts, Gaussian(covariance), (0, 1), wire, form)
    close = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}[wire]
    for column in (0, 1):
        np.testing.assert_allclose(found.known[column].mean, exact.known[column].mean, atol=close)
        np.testing.assert_allclose(found.known[column].covariance, exact.known[column].covariance, atol=2 * close)
        assert torch.isfinite(found.known[column].draw(10, torch.Generator())).all()


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_drawn_features_have_the_moments(covariance):
    rng = np.random.default_rng(3)
    Z = rng.standard_normal((30, 3)) @ np.array([[2, 0, 0], [1, 1, 0], [0, 0.5, 0.1]]) + [1, -2, 0]
    known = pooled([(Z, np.zeros(30, dtype=np.int64))], Gaussian(covariance), (0,)).known[0]
    drawn = known.draw(200_000, torch.Generator().manual_seed(0)).numpy()
    expected = np.cov(Z.T) if covariance == "full" else np.diag(np.cov(Z.T).diagonal())
    np.testing.assert_allclose(drawn.mean(axis=0), Z.mean(axis=0), atol=0.03)
    np.testing.assert_allclose(np.cov(drawn.T), expected, atol=0.05)


def test_fewer_samples_than_features_draw_in_their_span_and_a_single_one_draws_itself():
    rng = np.random.default_rng(4)
    Z = rng.standard_normal((3, 8))
    known = pooled([(Z, np.zeros(3, dtype=np.int64))], Gaussian(), (0,)).known[0]
    drawn = known.draw(20, torch.Generator()).numpy() - Z.mean(axis=0)
    basis = np.linalg.qr((Z - Z.mean(axis=0))[:2].T)[0]
    np.testing.assert_allclose(drawn @ basis @ basis.T, drawn, atol=1e-6)
    alone = Moments(1, torch.from_numpy(Z[0]), torch.from_numpy(np.outer(Z[0], Z[0])))
    np.testing.assert_array_equal(alone.draw(2, torch.Generator()).numpy(), Z[[0, 0]])


# The head -------------------------------------------------------------------------------------------------------------


def network_of(sizes: list[int], dimension: int) -> Network:
    network = Network(feature_start(dimension))
    network.grow(sizes, 0)
    return network


def test_retraining_is_sgd_with_momentum_and_a_cosine_on_the_drawn_features():
    rng = np.random.default_rng(6)
    parts = [(rng.standard_normal((20, 4)) + np.arange(20)[:, None] % 3, np.arange(20) % 3)]
    knobs = Gaussian(samples=10, epochs=3, lr=0.1, batch_size=8)
    head, network = pooled(parts, knobs), network_of([2, 1], 4)
    before = {name: value.clone() for name, value in network.state().items()}
    head.retrain(network, Heads(((0, 1), (2,)), (2,)), seed=9)
    assert same(before, network.state())
    W = np.concatenate([before["heads.0.weight"], before["heads.1.weight"]]).astype(float)
    b, V, v = np.zeros(3), np.zeros((3, 4)), np.zeros(3)
    Z, y = (part.numpy() for part in head.draw(9))
    assert y.tolist() == [0] * 10 + [1] * 10 + [2] * 10
    order = torch.Generator().manual_seed(10)
    batches = [batch.numpy() for _ in range(3) for batch in epoch_batches(30, 8, order)]
    for step, chosen in enumerate(batches):
        scores = Z[chosen] @ W.T + b
        P = np.exp(scores - scores.max(axis=1, keepdims=True))
        error = P / P.sum(axis=1, keepdims=True) - np.eye(3)[y[chosen]]
        V, v = 0.9 * V + error.T @ Z[chosen] / len(chosen), 0.9 * v + error.mean(axis=0)
        rate = 0.1 * (1 + np.cos(np.pi * step / len(batches))) / 2
        W, b = W - rate * V, b - rate * v
    np.testing.assert_allclose(head.weight.numpy(), W, atol=1e-5)
    np.testing.assert_allclose(head.bias.numpy(), b, atol=1e-5)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_without_variance_the_head_ranks_the_nearest_class_mean_first(covariance):
    """Each class is one point, four times: the samples drawn are the class means themselves."""
    rng = np.random.default_rng(7)
    means = 3 * np.eye(5, 6)
    Z, labels = np.repeat(means, 4, axis=0), np.repeat(np.arange(5), 4)
    head = pooled([(Z, labels)], Gaussian(covariance, epochs=20, lr=0.1), tuple(range(5)))
    drawn, places = head.draw(0)
    np.testing.assert_allclose(drawn.numpy(), means[places.numpy()], atol=1e-6)
    network = network_of([5], 6)
    head.retrain(network, Heads((tuple(range(5)),), tuple(range(5))), seed=0)
    near = means[rng.integers(0, 5, 300)] + 0.3 * rng.standard_normal((300, 6))
    nearest = ((near[:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    scores = torch.from_numpy(near).float() @ head.weight.T + head.bias
    assert (scores.argmax(dim=1).numpy() == nearest).mean() > 0.98


def test_rows_of_classes_that_nobody_told_of_stay_as_they_were_trained():
    rng = np.random.default_rng(8)
    parts = [(rng.standard_normal((20, 4)), np.array([0, 2])[np.arange(20) % 2])]
    head, network = pooled(parts, Gaussian(lr=0.5)), network_of([3], 4)
    head.retrain(network, Heads(((0, 1, 2),), (0, 1, 2)), seed=1)
    moved = (head.weight != network.heads[0].weight).any(dim=1)
    assert moved.tolist() == [True, False, True]
    nobody = ReplayHead(Gaussian(), 4, CPU)
    nobody.retrain(network, Heads(((0, 1, 2),), (0, 1, 2)), seed=1)
    assert torch.equal(nobody.weight, network.heads[0].weight)


def test_a_step_size_that_diverges_is_told_with_its_key():
    rng = np.random.default_rng(9)
    parts = [(1e4 * rng.standard_normal((20, 4)), np.arange(20) % 3)]
    head = pooled(parts, Gaussian(lr=1e38))
    with pytest.raises(UserError, match=r"^method\.gaussian\.lr=1e\+38: retraining the heads diverged"):
        head.retrain(network_of([3], 4), Heads(((0, 1, 2),), (0, 1, 2)), seed=1)


# Whole runs -----------------------------------------------------------------------------------------------------------

SMALL = [name for name in NAMES if trains(name) and name != "joint_training"]


@pytest.mark.parametrize("name", SMALL)
def test_it_changes_predictions_of_every_method_and_nothing_of_its_training(name):
    tasks = image_tasks(np.random.default_rng(0), [2, 2], [[9, 6, 0], [8, 1, 7]])
    models, ways = {}, {}
    for way in ("none", "gaussian"):
        method = class_of(name)(training=training(rounds=1), replay_head=way, gaussian=Gaussian(samples=20, lr=0.1))
        federation = federation_of(method, tiny_problem(), tasks)
        federation.run(lambda _: None)
        models[way] = model_of(federation)
        ways[way] = federation
        stages = {row.stage for row in federation.state.ledger.uploads}
        assert (MOMENTS in stages) == (way == "gaussian")
        names = federation.server.state_dict()
        assert any(own.startswith("moments.") for own in names) == (way == "gaussian")
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
        method = FineTune(training(), on="features", replay_head="gaussian", gaussian=Gaussian(covariance))
        federation = federation_of(method, feature_problem(), tasks)
        federation.run(lambda _: None)
        rows = [row for row in federation.state.ledger.uploads if row.stage == MOMENTS and row.up_bytes]
        assert len(rows) == 8
        for row in rows:
            labels = tasks[row.task][row.client][1]
            told = int((np.bincount(labels.numpy() - 2 * row.task, minlength=2) > 1).sum())
            square = d * d * told if covariance == "full" else d * c
            assert row.up_bytes == 4 * (c + d * c + square)


def test_a_new_task_predicts_by_its_trained_heads_until_its_moments_are_in():
    tasks = feature_tasks(0, [2, 2], SIZES[:2])
    method = FineTune(training(rounds=3), on="features", replay_head="gaussian")
    federation, shapes = federation_of(method, feature_problem(), tasks), []

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


@pytest.mark.parametrize("on", ["images", "features"])
def test_a_run_that_is_resumed_after_any_round_is_the_same_bit_for_bit(on):
    images = on == "images"
    tasks = image_tasks(np.random.default_rng(0), [2, 2, 2], SIZES) if images else feature_tasks(0, [2, 2, 2], SIZES)
    problem = tiny_problem() if images else feature_problem()
    method = FineTune(training(fraction=0.5), on=on, replay_head="gaussian", gaussian=Gaussian(samples=16, lr=0.1))
    saved = []

    def save(done):
        state, tensors = done.save()
        saved.append(({**state}, {name: value.clone() for name, value in tensors.items()}))

    whole = federation_of(method, problem, tasks)
    whole.run(save, every=1)
    wanted = {name: value.clone() for name, value in whole.server.state_dict().items()}
    for state, tensors in saved[:-1]:
        resumed = federation_of(method, problem, tasks)
        resumed.restore({**state}, tensors)
        resumed.run(lambda _: None)
        assert same(resumed.server.state_dict(), wanted)
        assert np.array_equal(resumed.state.answers["correct"], whole.state.answers["correct"])
    last = federation_of(method, problem, tasks)
    last.restore(*saved[-1])
    inputs = torch.cat([inputs for inputs, _ in tasks[2]])
    assert torch.equal(last.server.predict(inputs), whole.server.predict(inputs))


@pytest.mark.parametrize("name", ["finetune", "fedprotip"])
def test_a_class_that_comes_back_is_pooled_with_what_was_known_of_it(name):
    """FedProTIP gives it a second logit, of which the larger counts."""
    tasks = image_tasks(np.random.default_rng(1), [3, 2], [[12, 9], [10, 8]])
    # Class 2 comes back: the second task's first class is the first task's last.
    second = [(images, labels - 1) for images, labels in tasks[1]]
    method = class_of(name)(training=training(), replay_head="gaussian")
    federation = federation_of(method, tiny_problem(), [tasks[0], second])
    federation.run(lambda _: None)
    server = federation.server
    labels = torch.cat([labels for task in (tasks[0], second) for _, labels in task])
    assert [server.replay.known[column].count for column in range(4)] == torch.bincount(labels).tolist()
    assert len(server.replay.weight) == (5 if name == "fedprotip" else 4)
    assert server.predict(tasks[0][0][0]).shape[1] == 4


def test_stale_features_are_told_once_and_fixed_ones_are_not(caplog):
    tasks = image_tasks(np.random.default_rng(0), [2, 2, 2], SIZES)
    federation_of(FineTune(training(), replay_head="gaussian"), tiny_problem(), tasks).run(lambda _: None)
    [told] = [record.message for record in caplog.records]
    assert told.startswith("method.replay_head=gaussian: the features train")
    caplog.clear()
    method = FineTune(training(), on="features", replay_head="gaussian")
    federation_of(method, feature_problem(), feature_tasks(0, [2, 2, 2], SIZES)).run(lambda _: None)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"second.1": None}, "it has samples of class 1 and no second moment of it"),
        ({"counts": torch.tensor([3, 0])}, "it has moments of class 1 and no sample of it"),
        ({"counts": torch.tensor([3, 1])}, "it tells of 1 samples of class 1, fewer than 2"),
    ],
)
def test_uploads_that_contradict_themselves_are_refused(change, said):
    Z, labels = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 1])
    upload = dict(moments_message(Z, labels, (0, 1), Gaussian())) | change
    head = ReplayHead(Gaussian(), 3, CPU)
    assert head.objection(Message({name: value for name, value in upload.items() if value is not None}), (0, 1)) == said


def test_what_is_impossible_is_refused_with_its_key():
    with pytest.raises(UserError, match=r"^method\.replay_head=gaussian has no meaning with all data in one place"):
        JointTraining(replay_head="gaussian")
    for knobs, told in (
        ({"replay_head": "gauss"}, r"method\.replay_head=gauss is not known \(did you mean gaussian"),
        ({"gaussian": {"covariance": "low"}}, r"method\.gaussian\.covariance=low is not known"),
        ({"gaussian": {"lr": 0}}, r"method\.gaussian\.lr=0\.0 is out of range"),
        ({"gaussian": {"least": 0}}, r"method\.gaussian\.least=0 is out of range"),
    ):
        with pytest.raises(UserError, match=told):
            typed_instance(FineTune, knobs, "method")


def test_covariances_that_no_memory_holds_are_refused_before_any_work():
    method = FineTune(training(), on="features", replay_head="gaussian")
    with pytest.raises(UserError, match=r"^method\.gaussian\.covariance=full needs 7\.45e\+08 GiB for the covariances"):
        method.check(feature_problem(10**7), [600, 400])
    FineTune(training(), on="features", replay_head="gaussian", gaussian=Gaussian("diagonal")).check(
        feature_problem(10**7), [1000]
    )


@pytest.mark.parametrize("seed", range(3))
def test_on_a_skewed_stream_of_digits_it_is_clearly_better_than_the_trained_head(seed):
    """10 classes in 5 tasks, each class with two clients of four: the trained head knows the last task only."""
    Z, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(y))
    Z, y = Z[order] / 16, rng.permutation(10)[y[order]]
    test, learnt = slice(0, 500), slice(500, None)
    tasks = []
    for task in range(5):
        clients = []
        for client in range(4):
            of_class = y[learnt] == 2 * task + client % 2
            own = np.flatnonzero(of_class & (np.arange(len(of_class)) % 2 == client // 2))
            clients.append((torch.from_numpy(Z[learnt][own]), torch.from_numpy(y[learnt][own])))
        tasks.append(clients)
    method = FineTune(training(rounds=5, lr=0.1, batch_size=16), on="features", replay_head="gaussian")
    federation = federation_of(method, feature_problem(64, seed=seed), tasks)
    federation.run(lambda _: None)

    def accuracy() -> float:
        scores = federation.server.classify(TestBatch.of(torch.from_numpy(Z[test]))).scores
        return float((scores.argmax(dim=1).numpy() == y[test]).mean())

    calibrated = accuracy()
    federation.server.replay.drop()
    assert calibrated > 0.8
    assert calibrated > accuracy() + 0.4


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_the_command_resumes_it_from_its_files_bit_for_bit(covariance, tmp_path, monkeypatch):
    choice = ("method=finetune", "method.on=features", "method.replay_head=gaussian", "method.training.rounds=1")
    choice += (f"method.gaussian.covariance={covariance}", "method.gaussian.samples=64", "method.gaussian.lr=0.1")
    choice += ("tasks=3", "clients=3")
    whole = run_in(tmp_path / "whole", *choice)
    with interrupted_in(2, monkeypatch):
        run_in(tmp_path / "parts", *choice)
    parts = run_in(tmp_path / "parts", *choice)
    assert parts.record["metrics"] == whole.record["metrics"]
    assert whole.record["metrics"]["A_T"] > 50
    assert (parts.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()
    assert set(whole.record["communication"]["by_stage"]) == {"model", MOMENTS}
