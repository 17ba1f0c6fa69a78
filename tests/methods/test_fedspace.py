"""FedSpace: both halves against plain NumPy, what travels and stays, and the limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.averaging.fedspace import FedSpace, Prototyped, contrast, moments
from fcl_bench.protocol.message import Message
from fcl_bench.typed import typed_instance
from tests.methods import fedspace_oracle as oracle
from tests.methods.harness import turn
from tests.methods.softmax_oracle import setting, small_batches
from tests.methods.training_harness import feature_tasks, image_shard, images_stream, one_head
from tests.methods.whole_runs import feature_context, learnt, model_of, same
from tests.small_runs import run_in

#: FedAvg but for the prototypes.
AVERAGED = {"global_weight": 1.0, "temperature": 1.0, "loss_classes": "task"}
#: FedAvg.
PLAIN = {**AVERAGED, "w_prototype": 0.0, "w_representation": 0.0}
#: Two clients of a task with the classes 0 to 2; the first has one sample of class 0, and none of class 2.
TASKS = feature_tasks(0, [3], [[7, 9]])
TASKS[0][0] = TASKS[0][0][0], torch.tensor([0, 1, 1, 1, 1, 1, 1])
TASKS[0][1] = TASKS[0][1][0], torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2])


class Draws:
    """The random draws of a turn, again."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def whole(self, below: int, count: int) -> np.ndarray:
        return torch.randint(below, (count,), generator=self._generator).numpy()

    def normal(self, *sides: int) -> np.ndarray:
        return torch.randn(sides, generator=self._generator).double().numpy()


# A client's loss ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.3, 1.0])
def test_the_contrast_and_its_gradient_are_those_of_the_equation(tau):
    rng = np.random.default_rng(0)
    Z, labels, now = rng.standard_normal((8, 4)), np.array([0, 3, 3, 1, 0, 0, 2, 1]), {0, 2, 3}
    features = torch.tensor(Z, requires_grad=True)
    value = contrast(features, torch.tensor(labels), torch.tensor(sorted(now)), tau)
    value.backward()
    assert value.item() == pytest.approx(oracle.contrast(Z, labels, now, tau), rel=1e-12)
    for place in ((0, 0), (3, 1), (6, 2)):  # an anchor, a feature of another class, a class of its own
        ends = []
        for step in (1e-6, -1e-6):
            moved = Z.copy()
            moved[place] += step
            ends.append(oracle.contrast(moved, labels, now, tau))
        assert features.grad[place].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("over", ["own", "seen", "task"])
def test_the_loss_of_a_batch_is_that_of_the_equations(over):
    """Classes 1, 2, 4 are known; the client has 2 and 3 now, and has had 0; the task has 2, 3 and 4."""
    rng = np.random.default_rng(1)
    network, columns, means = one_head(rng, 5), [1, 2, 4], rng.standard_normal((3, 4))
    Z, labels = rng.standard_normal((6, 4)), np.array([2, 3, 3, 2, 2, 3])
    method = FedSpace(
        small_batches(), loss_classes=over, w_prototype=0.7, w_representation=0.4, temperature=0.5, tau=0.8
    )
    broadcast = Message(
        {
            **{"classes": torch.tensor([5]), "columns": torch.arange(5), "task": torch.tensor([2, 3, 4])},
            **{"known": torch.tensor(columns), "prototypes": torch.tensor(means), "radius": torch.tensor([0.6])},
        }
    )
    objective = Prototyped(method, [0, 2, 3], torch.tensor([2, 3]), broadcast, True, seed=5)
    found = objective.loss(network, torch.from_numpy(Z), torch.from_numpy(labels))
    found.backward()

    W, b = (parameter.detach().numpy().copy() for parameter in network.heads[0].parameters())
    own = {"own": [0, 2, 3], "seen": [0, 1, 2, 3, 4], "task": [2, 3, 4]}[over]
    radius, count, draws = float(broadcast["radius"]), method.training.batch_size, Draws(5)
    made = oracle.drawn(draws, columns, means, radius, [0, 2], count)
    contrasted = oracle.drawn(draws, columns, means, radius, [0, 1, 2], count)
    assert set(made[1].tolist()) <= {1, 4}

    def at(W: np.ndarray) -> float:
        return oracle.loss(W, b, Z, labels, own, made, contrasted, {2, 3}, (0.7, 0.4, 0.5, 0.8))

    assert found.item() == pytest.approx(at(W), rel=1e-12)
    gradient = np.zeros_like(W)
    for place in np.ndindex(W.shape):
        step = np.zeros_like(W)
        step[place] = 1e-6
        gradient[place] = (at(W + step) - at(W - step)) / 2e-6
    np.testing.assert_allclose(network.heads[0].weight.grad.numpy(), gradient, atol=1e-7)


def test_before_anything_is_known_the_loss_is_cross_entropy():
    rng = np.random.default_rng(2)
    network, Z, labels = one_head(rng, 5), rng.standard_normal((3, 4)), np.array([0, 4, 4])
    broadcast = Message({"classes": torch.tensor([5])})
    objective = Prototyped(FedSpace(small_batches()), [0, 4], torch.tensor([0, 4]), broadcast, True, seed=5)
    W, b = (parameter.detach().numpy() for parameter in network.heads[0].parameters())
    expected = oracle.cross_entropy(((Z @ W.T + b) / 0.1)[:, [0, 4]], np.array([0, 1, 1]))
    found = objective.loss(network, torch.from_numpy(Z), torch.from_numpy(labels))
    assert found.item() == pytest.approx(expected, rel=1e-12)


# What a client sends and keeps ----------------------------------------------------------------------------------------


def test_the_radius_and_the_means_are_those_of_numpy():
    rng = np.random.default_rng(3)
    Z, labels = rng.standard_normal((9, 4)), np.array([0, 0, 2, 0, 2, 2, 2, 3, 0])
    counts, means, radius = moments(torch.from_numpy(Z), torch.from_numpy(labels), 5)
    assert radius.item() == pytest.approx(oracle.radius(Z, labels), rel=1e-12)
    assert counts.tolist() == [4, 0, 4, 1, 0]
    np.testing.assert_allclose(means[:, 2].numpy(), Z[labels == 2].mean(axis=0), rtol=1e-12)
    assert not means[:, [1, 4]].any()
    assert moments(torch.from_numpy(Z[:1]), torch.tensor([3]), 5)[2].item() == 0 == oracle.radius(Z[:1], labels[:1])


def test_a_client_sends_its_prototypes_and_keeps_its_classes_and_its_first_radius():
    method, context = FedSpace(small_batches(), trains="features"), feature_context()
    server, client, states = method.server(context), method.client(context), {}
    [task] = images_stream(TASKS)
    server.start_task(task)
    uploads = [turn(client, image_shard(k, 0, *TASKS[0][k]), server.broadcast(task, 0), states) for k in (0, 1)]
    for upload, (Z, labels) in zip(uploads, TASKS[0], strict=True):
        n, held = len(labels), [int((labels == c).sum()) for c in range(3)]
        assert upload["weights"].tolist() == [n if count else 0 for count in held]
        expected = [n * Z[labels == c].numpy().mean(axis=0) if held[c] else np.zeros(6) for c in range(3)]
        np.testing.assert_allclose(upload["prototypes"].numpy(), np.array(expected).T, rtol=1e-5)
        assert upload["radius"].item() == pytest.approx(n * oracle.radius(Z.numpy(), labels.numpy()), rel=1e-5)
    first = float(states[0]["radius"])
    assert states[0]["classes"].tolist() == [0, 1]
    turn(client, image_shard(0, 0, 5 * TASKS[0][0][0], torch.full((7,), 2)), server.broadcast(task, 0), states)
    assert states[0]["classes"].tolist() == [0, 1, 2]
    assert float(states[0]["radius"]) == first


# The server -----------------------------------------------------------------------------------------------------------


def test_the_servers_rounds_are_those_of_the_equations():
    """Client 1 sits the second round out, in which nobody has class 2: its prototype stays as it is."""
    rng, method = np.random.default_rng(4), FedSpace(small_batches(), trains="features", ema=0.3, global_weight=0.6)
    server = method.server(feature_context())
    [task] = images_stream(TASKS)
    server.start_task(task)
    names = ("heads.0.weight", "heads.0.bias")

    def flat(tensors) -> np.ndarray:
        return np.concatenate([np.asarray(tensors[name], dtype=float).ravel() for name in names])

    expected = oracle.Server(flat(server.network.state()), 0.3, 0.6)
    for round_, present in enumerate([(0, 1, 2), (0, 2)]):
        sent, clients = server.broadcast(task, round_), []
        for client in present:
            n, radius = 4 + 3 * client, float(rng.random())
            held = [c for c in range(3) if (c + client) % 3 and (c < 2 or not round_)]
            own = {c: rng.standard_normal(6) for c in held}
            model = {name: torch.from_numpy(rng.standard_normal(sent[name].shape)) for name in names}
            table = np.stack([n * own[c] if c in own else np.zeros(6) for c in range(3)]).T
            beside = {
                "prototypes": torch.from_numpy(table),
                "weights": torch.tensor([n if c in own else 0 for c in range(3)], dtype=torch.int32),
                "radius": torch.tensor([n * radius], dtype=torch.float64),
            }
            server.absorb(client, Message({**model, **beside}, samples=n))
            clients.append((n, flat(model), radius, own))
        server.finish_round()
        expected.round(clients)
        assert server.radius == pytest.approx(expected.radius, rel=1e-12)
        np.testing.assert_allclose(flat(server.network.state()), expected.model, atol=1e-6)
        assert server.prototypes.keys() == expected.prototypes.keys() == {0, 1, 2}
        for c, mean in expected.prototypes.items():
            np.testing.assert_allclose(server.prototypes[c].numpy(), mean, rtol=1e-12)
    known = server.broadcast(task, 1)
    assert known["known"].tolist() == [0, 1, 2]
    np.testing.assert_allclose(known["prototypes"].numpy(), np.stack([expected.prototypes[c] for c in range(3)]), 1e-6)


def test_an_upload_that_weighs_a_class_more_than_its_samples_is_refused():
    server = FedSpace(small_batches(), trains="features").server(feature_context())
    sent = {"weights": torch.tensor([5, 0])}
    assert "weighs a class" in server.objection(Message(sent, samples=4))
    assert server.objection(Message(sent, samples=5)) == ""


# Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("images")
@pytest.mark.parametrize("trains", ["images", "features"])
def test_without_terms_and_mixing_it_is_fedavg_bit_for_bit(trains):
    context, tasks = setting(trains)
    ours, theirs = (
        learnt(method, context, tasks)
        for method in (FedSpace(small_batches(), trains=trains, **PLAIN), FedAvg(small_batches(), trains=trains))
    )
    assert same(model_of(ours), model_of(theirs))
    sizes = [[(row.up_bytes, row.down_bytes) for row in run.state.ledger.uploads] for run in (ours, theirs)]
    assert sizes[0] == sizes[1]
    assert ours.state.client_storage_bytes == {}
    assert ours.server.prototypes == {}


@pytest.mark.slow_cases("representation", "mixing")
@pytest.mark.parametrize(
    ("trains", "knobs"),
    [
        pytest.param("features", {"w_prototype": 0.1}, id="prototypes"),
        pytest.param("features", {"loss_classes": "own"}, id="own classes"),
        pytest.param("images", {"w_representation": 0.1}, id="representation"),
        pytest.param("images", {"global_weight": 0.5}, id="mixing"),
    ],
)
def test_every_part_changes_the_model(trains, knobs):
    context, tasks = setting(trains)
    method = FedSpace(small_batches(), trains=trains, **{**PLAIN, **knobs})
    plain = learnt(FedAvg(small_batches(), trains=trains), context, tasks)
    assert not same(model_of(learnt(method, context, tasks)), model_of(plain))


def test_on_features_the_contrast_has_no_gradient_and_nothing_is_sent_for_it():
    context, tasks = setting("features")
    found = learnt(FedSpace(small_batches(), trains="features", **{**PLAIN, "w_representation": 0.5}), context, tasks)
    plain = learnt(FedAvg(small_batches(), trains="features"), context, tasks)
    assert same(model_of(found), model_of(plain))
    assert found.server.prototypes == {}


def test_messages_have_the_bytes_of_the_formulas():
    context, tasks = setting("features")
    d = context.inputs
    ours = learnt(FedSpace(small_batches(), trains="features"), context, tasks)
    plain = learnt(FedAvg(small_batches(), trains="features"), context, tasks)
    for row, beside in zip(ours.state.ledger.uploads, plain.state.ledger.uploads, strict=True):
        if row.up_bytes:
            known = 3 * (row.task + (row.round > 0))
            assert row.up_bytes == beside.up_bytes + 4 * (3 * d + 3 + 1)
            assert row.down_bytes == beside.down_bytes + ((4 * d + 4) * known + 8 if known else 0)
    assert ours.state.client_storage_bytes == {"classes": 4 * 6, "radius": 8}


@pytest.mark.slow
def test_a_stream_of_clients_out_of_step_runs(tmp_path):
    """On images too; in the end each client has had all ten classes."""
    small = (
        "partition=iid",
        "clients=3",
        "tasks=3",
        "split=asynchronous",
        "split.groups=3",
        "backbone=tiny",
        "backbone.width=4",
    )
    outcome = run_in(tmp_path, "method=fedspace", "data=digits", "method.training.rounds=1", *small)
    assert outcome.record["client_storage_bytes"]["classes"] == 40


@pytest.mark.parametrize(
    "knobs",
    [{"ema": 0}, {"ema": 1.5}, {"global_weight": 0}, {"temperature": 0}, {"w_prototype": -1}, {"loss_classes": "all"}],
    ids=str,
)
def test_knobs_out_of_range_are_refused(knobs):
    with pytest.raises(UserError, match=next(iter(knobs))):
        typed_instance(FedSpace, knobs, "method")
