"""FedDisco: discrepancies and weights by hand, the stage that counts, and the limits."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.validation import BadUpload
from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.averaging.feddisco import FedDisco, discrepancies
from fcl_bench.methods.data_free.fedgen import FedGen
from fcl_bench.methods.gradient.class_counts import COUNTS
from fcl_bench.methods.gradient.client import MODEL
from fcl_bench.options.faults.choices import Faulty, ListedFaults
from fcl_bench.protocol.context import Task
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import Training
from fcl_bench.typed import typed_instance
from tests.methods.harness import take_in
from tests.methods.softmax_oracle import TASKS, Oracle, class_weights, setting, small_batches, whole_batches
from tests.methods.training_harness import federation_of, images_stream, learn_images
from tests.methods.whole_runs import feature_context, learnt, model_of, same

KINDS = ("kl", "cosine", "l1", "l2")


def by_hand(table: np.ndarray, a: float = 0.5, b: float = 0.1, kind: str = "kl") -> np.ndarray:
    """The weights as printed, client by client."""
    found = []
    for counts in table:
        D, C = counts / counts.sum(), len(counts)
        if kind == "kl":
            found.append(sum(share * np.log(share * C) for share in D if share))
        elif kind == "cosine":
            found.append(1 - D.sum() / C / (np.sqrt((D**2).sum()) * np.sqrt(C / C**2)))
        elif kind == "l1":
            found.append(sum(abs(share - 1 / C) for share in D))
        else:
            found.append(sum((share - 1 / C) ** 2 for share in D) ** 0.5)
    d = np.array(found)
    if kind == "kl" and d.sum():
        d = d / d.sum()
    p = table.sum(axis=1) / table.sum()
    w = np.maximum(p - a * d + b, 0)
    return w / w.sum()


def weights(table, **knobs) -> np.ndarray:
    found = FedDisco(**knobs).weights(torch.tensor(table, dtype=torch.int32))
    assert found is not None
    return found.numpy()


# The weights ---------------------------------------------------------------------------------------------------------


def test_the_weights_by_hand():
    """p = (0.75, 0.25), D = ((0.5, 0.5), (1, 0)): d = (0, 1), so that ReLU(p - d / 2 + 0.1) = (0.85, 0)."""
    table = [[3, 3], [2, 0]]
    np.testing.assert_allclose(discrepancies(torch.tensor(table), "kl"), [0, 1], atol=1e-12)
    np.testing.assert_array_equal(weights(table), [1, 0])
    np.testing.assert_allclose(weights(table, a=0.3), [0.85 / 0.9, 0.05 / 0.9], rtol=1e-12)


def test_the_discrepancies_by_hand():
    """Of one class in two: log 2 (before it is shared out), 1 - 1 / sqrt 2, |1/2| + |1/2|, and its square root."""
    table = torch.tensor([[4, 0], [1, 1], [0, 7]])
    for kind, one in (("kl", 0.5), ("cosine", 1 - 0.5**0.5), ("l1", 1.0), ("l2", 0.5**0.5)):
        np.testing.assert_allclose(discrepancies(table, kind), [one, 0, one], atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_the_weights_are_those_of_the_equation(kind, seed):
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 9, (6, 4)) * (rng.random((6, 4)) < 0.6)
    table[:, 0] += 1
    a, b = rng.random(2) * [0.3, 0.3]
    found = weights(table, a=a, b=b, discrepancy=kind)
    np.testing.assert_allclose(found, by_hand(table, a, b, kind), atol=1e-12)
    assert found.sum() == pytest.approx(1, abs=1e-12)
    order = rng.permutation(6)
    np.testing.assert_allclose(weights(table[order], a=a, b=b, discrepancy=kind), found[order], atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_clients_that_are_equally_far_off_differ_by_their_shares_alone(kind):
    balanced, one_class = np.array([[4, 4], [1, 1], [5, 5]]), np.array([[8, 0], [2, 0], [0, 10]])
    p = np.array([0.4, 0.1, 0.5])
    np.testing.assert_allclose(weights(balanced, discrepancy=kind), (p + 0.1) / 1.3, rtol=1e-9)
    d = discrepancies(torch.tensor(one_class), kind).numpy()
    np.testing.assert_allclose(d, np.full(3, d[0]))
    # KL is shared out: a third each, so that it is no p + b.
    assert kind != "kl" or d[0] == pytest.approx(1 / 3)
    np.testing.assert_allclose(weights(one_class, a=0.1, discrepancy=kind), by_hand(one_class, 0.1, 0.1, kind))


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_where_all_weights_would_be_0_it_is_fedavg_and_says_so(weighting, caplog):
    """Two classes of three, 5 and 1 or 0 and 4 samples: d = 1 and 4/3 in l1, and no share is above 1."""
    context, rng = feature_context(), np.random.default_rng(0)
    labels = ([0] * 5 + [1], [2] * 4)
    tasks = [[(torch.from_numpy(rng.standard_normal((len(y), 6))), torch.tensor(y)) for y in labels]]
    method = FedDisco(small_batches(weighting=weighting), trains="features", a=1.0, b=0.0, discrepancy="l1")
    assert method.weights(torch.tensor([[5, 1, 0], [0, 0, 4]])) is None
    with caplog.at_level(logging.WARNING):
        found = learnt(method, context, tasks)
    assert caplog.text.count("all weights of a round are 0") == 1
    assert same(
        model_of(found), model_of(learnt(FedAvg(small_batches(weighting=weighting), trains="features"), context, tasks))
    )


def test_uniform_weighting_replaces_the_shares():
    table = [[3, 3], [2, 0], [1, 0]]
    found = weights(table, a=0.2, discrepancy="l1", training=Training(weighting="uniform"))
    w = np.array([1 / 3, 1 / 3 - 0.2, 1 / 3 - 0.2]) + 0.1
    np.testing.assert_allclose(found, w / w.sum(), rtol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_with_a_hundred_clients_the_default_b_makes_the_weights_nearly_uniform(seed):
    """b = 0.1 is ten times the mean share: CIFAR-100's classes, each dealt by a Dirichlet law of 0.01."""
    rng, clients = np.random.default_rng(seed), 100
    table = np.stack([rng.multinomial(500, rng.dirichlet(np.full(clients, 0.01))) for _ in range(100)], axis=1)
    table = table[table.any(axis=1)]
    p = table.sum(axis=1) / table.sum()
    assert p.max() > 50 * p.min()
    found = weights(table)
    np.testing.assert_allclose(found, by_hand(table), atol=1e-12)
    assert 0.0088 < found.min() < found.max() < 0.0126
    # The discrepancy has next to no part in that; without b it would.
    assert np.abs(weights(table, a=0.0) - found).max() < 0.0005
    assert np.abs(weights(table, a=0.0, b=0.0) - weights(table, b=0.0)).max() > 0.005


# Training ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("images")
@pytest.mark.parametrize("trains", ["images", "features"])
def test_without_a_and_b_it_is_fedavg_bit_for_bit_and_nothing_is_counted(trains):
    context, tasks = setting(trains)
    knobs = small_batches(fraction=0.5)
    off, plain = (
        learnt(m, context, tasks) for m in (FedDisco(knobs, trains=trains, a=0, b=0), FedAvg(knobs, trains=trains))
    )
    assert same(model_of(off), model_of(plain))
    rows = [[(r.stage, r.round, r.up_bytes, r.down_bytes) for r in run.state.ledger.uploads] for run in (off, plain)]
    assert rows[0] == rows[1]
    assert not same(model_of(learnt(FedDisco(knobs, trains=trains, b=0), context, tasks)), model_of(plain))


@pytest.mark.parametrize("trains", ["images", "features"])
def test_a_single_client_is_fedavg_bit_for_bit(trains):
    """The counts shift neither the schedule nor the batches."""
    context, tasks = setting(trains)
    one, knobs = [[clients[0]] for clients in tasks], small_batches(rounds=3, schedule="cosine")
    found, plain = (learnt(method(knobs, trains=trains), context, one) for method in (FedDisco, FedAvg))
    assert same(model_of(found), model_of(plain))


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_on_features_is_the_oracles(kind, weighting):
    context, knobs = feature_context(), whole_batches(lr=0.1, weighting=weighting)

    def shares(table):
        if weighting == "samples":
            return by_hand(table, 0.4, 0.05, kind)
        # As many samples each, of the same distribution.
        return by_hand(table / table.sum(axis=1, keepdims=True), 0.4, 0.05, kind)

    method = FedDisco(knobs, loss_classes="seen", trains="features", a=0.4, b=0.05, discrepancy=kind)
    expected = Oracle(knobs, shares=shares).run(context, TASKS)
    np.testing.assert_allclose(class_weights(learnt(method, context, TASKS)), expected, atol=1e-5)
    assert np.abs(Oracle(knobs).run(context, TASKS) - expected).max() > 1e-3


def test_of_the_clients_drawn_for_a_round_the_weights_sum_to_1():
    """And KL is shared out among them alone."""
    context, tasks = setting("features")
    method = FedDisco(small_batches(rounds=4, fraction=0.5), trains="features")
    server, seen = method.server(context), []
    task = images_stream(tasks)[0]
    server.start_task(task)
    table = np.array([[9, 0, 0], [2, 2, 2], [0, 1, 4], [7, 1, 0]])
    server.broadcast(task, 0)
    for client, row in enumerate(table):
        server.absorb(client, Message({"counts": torch.tensor(row, dtype=torch.int32)}, COUNTS))
    for round_ in range(1, server.rounds(task)):
        present = server.participants(task, round_, [0, 1, 2, 3])
        server.broadcast(task, round_)
        found = [server.weight(client, Message({}, MODEL, samples=1)) for client in present]
        np.testing.assert_allclose(found, by_hand(table[present]), atol=1e-12)
        seen.append(tuple(present))
    assert len(set(seen)) > 1
    assert {len(present) for present in seen} == {2}


# A client that is dropped in a round ----------------------------------------------------------------------------------

#: p = (6, 2, 4) / 12; the first client is balanced, and d is (0, 0.5, 0.5).
TABLE = np.array([[3, 3], [2, 0], [0, 4]])


def after_a_round(came: list[int], **knobs) -> tuple[dict, list[dict]]:
    """The server's model after a round of three clients in which the models of `came` arrive; and those models."""
    context, _ = setting("features")
    server, task = FedDisco(small_batches(), trains="features", **knobs).server(context), Task(0, range(2), 2)
    server.start_task(task)
    server.broadcast(task, 0)
    for client, row in enumerate(TABLE):
        server.absorb(client, Message({"counts": torch.tensor(row, dtype=torch.int32)}, COUNTS))
    present = server.participants(task, 1, [0, 1, 2])
    server.broadcast(task, 1)
    models = [{name: torch.full_like(value, 10.0**client) for name, value in server.sent.items()} for client in present]
    for client in came:
        server.absorb(client, Message(models[client], MODEL, samples=int(TABLE[client].sum())))
    server.finish_round()
    return server.network.state(), models


@pytest.mark.parametrize("came", [[0, 1, 2], [0, 2], [1, 2], [2]])
def test_without_a_dropped_client_the_others_keep_their_proportions(came):
    """The discrepancies stay those among all that were asked (docs/explanation/hostile_uploads.md)."""
    found, models = after_a_round(came)
    weights = by_hand(TABLE)
    assert (weights > 0).all()
    for name, value in found.items():
        mean = sum(weights[client] * models[client][name] for client in came) / weights[came].sum()
        torch.testing.assert_close(value, mean.float())


def test_models_of_weight_0_count_by_their_shares_where_no_other_comes():
    """With a = 10 and b = 0 only the first client counts; a round without it is FedAvg's, and not lost."""
    assert by_hand(TABLE, a=10, b=0).tolist() == [1, 0, 0]
    found, models = after_a_round([0, 1, 2], a=10, b=0)
    assert same(found, {name: models[0][name] for name in found})
    found, models = after_a_round([1, 2], a=10, b=0)
    for name, value in found.items():
        torch.testing.assert_close(value, (2 * models[1][name] + 4 * models[2][name]) / 6)


def test_a_client_whose_counts_do_not_come_is_out_of_the_task():
    context, tasks = setting("features")

    def reached(*parts):
        return Faulty(InProcess.of(*parts), ListedFaults(silent=["0@1.0"]), 0)

    federation = federation_of(FedDisco(small_batches(), trains="features"), context, tasks, transport=reached)
    federation.run(lambda _: None)
    rows = [row for row in federation.state.ledger.uploads if row.task == 1]
    assert {row.client for row in rows if row.stage == MODEL and row.up_bytes} == {1, 2}


# The stage of the counts ---------------------------------------------------------------------------------------------


def test_every_client_counts_once_in_a_task_over_its_classes():
    """Class 0 comes back in the second task, whose classes are 0, 3 and 4."""
    rng = np.random.default_rng(0)
    labels = [[[0, 1, 2, 2], [1, 1]], [[4, 0, 0, 3, 4, 4], [3, 3, 3]]]
    tasks = [[(torch.from_numpy(rng.standard_normal((len(y), 6))), torch.tensor(y)) for y in of] for of in labels]
    context, sent = feature_context(), []
    method = FedDisco(small_batches(fraction=0.5), trains="features")
    learn_images(method, context, tasks, seen=lambda k, b, m: sent.append((k, b, m)) if b.stage == COUNTS else None)
    assert [(k, m["counts"].tolist()) for k, _, m in sent] == [
        (0, [1, 1, 2]),
        (1, [0, 2, 0]),
        (0, [2, 1, 3]),
        (1, [0, 3, 0]),
    ]
    assert {m["counts"].dtype for *_, m in sent} == {torch.int32}
    rows = learnt(method, context, tasks).state.ledger.uploads
    counted = [row for row in rows if row.stage == COUNTS]
    # No model goes down: the number of classes of each head, and in task 1 which they are.
    assert [(row.task, row.round, row.client, row.up_bytes) for row in counted] == [
        (0, 0, 0, 12),
        (0, 0, 1, 12),
        (1, 0, 0, 12),
        (1, 0, 1, 12),
    ]
    assert [row.down_bytes for row in counted] == [4, 4, 4 * (2 + 5 + 3), 4 * (2 + 5 + 3)]


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ([0, 0, 0], "it counts no sample"),
        ([1, 2], r"counts has the shape \(2,\)"),
        ([1, 2, -1], "counts holds -1"),
        ([1.0, 2.0, 3.0], "counts has the type float64"),
    ],
)
@pytest.mark.parametrize("method", [FedDisco, FedGen])
def test_counts_that_cannot_be_are_refused(counts, told, method):
    context, tasks = setting("features")
    server, task = method(trains="features").server(context), images_stream(tasks)[0]
    server.start_task(task)
    server.broadcast(task, 0)
    with pytest.raises(BadUpload, match=told):
        take_in(server, 0, Message({"counts": torch.tensor(counts)}, COUNTS), task)


def test_a_b_that_outweighs_the_shares_is_told_once(caplog):
    context, tasks = setting("features")
    with caplog.at_level(logging.WARNING):
        learnt(FedDisco(small_batches(), trains="features"), context, tasks)
        assert caplog.text == ""
        learnt(FedDisco(small_batches(), trains="features", b=3.0), context, tasks)
    assert caplog.text.count("method.b=3 is 6 times the mean share") == 1


@pytest.mark.parametrize(("name", "value"), [("a", -1), ("b", -0.1), ("discrepancy", "js"), ("a", float("inf"))])
def test_impossible_knobs_are_refused_with_their_key(name, value):
    with pytest.raises(UserError, match=rf"^method\.{name}="):
        typed_instance(FedDisco, {name: value}, "method")
