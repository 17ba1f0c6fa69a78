"""MOON: the contrast's value and gradient, where the representation is, what a client keeps, and the limits."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch

from fcl_bench.engine.in_process import InProcess
from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.distillation.moon import MOON, FeatureContrast, contrast
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Heads
from fcl_bench.typed import typed_instance
from tests.methods.plain_training import made_tasks
from tests.methods.softmax_oracle import TASKS, setting, small_batches
from tests.methods.training_harness import (
    feature_tasks,
    image_shard,
    images_stream,
    learn_image_task,
    tiny_context,
)
from tests.methods.whole_runs import feature_context, learnt, model_of, same


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def by_hand(r, g, j, tau) -> float:
    """l_con as it is printed."""
    to, away = np.exp(cosine(r, g) / tau), np.exp(cosine(r, j) / tau)
    return float(np.mean(-np.log(to / (to + away))))


def slope(r, g, j, tau) -> np.ndarray:
    """The gradient of each sample's l_con by r: s_j (d cos(r, j) - d cos(r, g)) / tau, s_j the softmax's share of j."""

    def of_cosine(a):
        length = np.linalg.norm(r, axis=1, keepdims=True)
        return a / length / np.linalg.norm(a, axis=1, keepdims=True) - cosine(r, a)[:, None] * r / length**2

    share = 1 / (1 + np.exp((cosine(r, g) - cosine(r, j)) / tau))
    return share[:, None] * (of_cosine(j) - of_cosine(g)) / tau


def drawn(rng: np.random.Generator, n: int = 5, width: int = 4) -> list[np.ndarray]:
    return [rng.standard_normal((n, width)) for _ in range(3)]


# The term ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.2, 0.5, 2.0])
def test_the_value_and_the_gradient_are_those_of_the_equation(tau):
    r, g, j = drawn(np.random.default_rng(0))
    own = torch.tensor(r, requires_grad=True)
    value = contrast(own, torch.tensor(g), torch.tensor(j), tau)
    value.backward()
    assert value.item() == pytest.approx(by_hand(r, g, j, tau), rel=1e-12)
    np.testing.assert_allclose(own.grad.numpy() * len(r), slope(r, g, j, tau), atol=1e-12)


def test_it_is_log_2_where_the_two_models_agree_and_smaller_near_the_broadcast_one():
    r, g, j = map(torch.tensor, drawn(np.random.default_rng(1)))
    own = r.clone().requires_grad_()
    value = contrast(own, g, g, 0.5)
    value.backward()
    assert value.item() == pytest.approx(math.log(2), rel=1e-12)
    assert not own.grad.any()
    # From r = r_j to r = r_g, with cos(r_g, r_j) = -1: e^2 against e^-2.
    assert contrast(g, g, -g, 0.5).item() == pytest.approx(math.log(1 + math.exp(-4)), rel=1e-12)
    assert contrast(-g, g, -g, 0.5).item() == pytest.approx(math.log(1 + math.exp(4)), rel=1e-12)
    assert contrast(r, g, j, 0.5).item() == pytest.approx(contrast(3 * r, 5 * g, 0.1 * j, 0.5).item(), rel=1e-12)
    assert contrast(r.bfloat16(), g.bfloat16(), j.bfloat16(), 0.5).dtype == torch.float32


@pytest.mark.parametrize("representation", ["feature", "projection"])
def test_the_gradient_by_the_body_is_that_of_finite_differences(representation):
    """In float64, with batch norm on the batch; the earlier model has one head."""
    heads = Heads(((0, 1, 2), (3, 4)), (3, 4))
    method = MOON(mu=3.0, representation=representation, width=6)
    client = method.client(tiny_context())
    client.prepare(heads)
    network, torch_rng = client.network.double(), torch.Generator().manual_seed(0)

    def moved(by: float, kept):
        values = {name: v + by * torch.randn(v.shape, generator=torch_rng).double().abs() for name, v in kept.items()}
        return client.frozen_copy(values).double()

    state = dict(network.state())
    known = moved(0.1, state)
    earlier = moved(0.1, {name: value for name, value in state.items() if not name.startswith("heads.1")})
    inputs = torch.randn(6, 3, 8, 8, generator=torch_rng).double()
    labels = torch.tensor([3, 4, 3, 4, 4, 3])
    objective = FeatureContrast(heads, method, known, earlier)
    network.train()
    objective.loss(network, inputs, labels).backward()
    weights = dict(network.named_parameters())
    looked_at = ["body.stage1.0.weight", "body.stage4.0.weight", "heads.0.weight", "heads.1.bias"]
    if representation == "projection":
        looked_at = [name.replace("body.", "body.backbone.") for name in looked_at]
        looked_at += ["body.projection.0.weight", "body.projection.2.bias"]
    for name in looked_at:
        weight, gradient = weights[name], weights[name].grad
        for entry in (np.unravel_index(i, weight.shape) for i in (0, weight.numel() // 2, weight.numel() - 1)):
            ends = []
            for step in (1e-6, -1e-6):
                with torch.no_grad():
                    weight[entry] += step
                    ends.append(float(objective.loss(network, inputs, labels)))
                    weight[entry] -= step
            assert gradient[entry].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4, abs=1e-8), name


# Limits --------------------------------------------------------------------------------------------------------------


def test_on_a_frozen_backbone_the_feature_is_constant_and_moon_is_fedavg(caplog):
    context, tasks = setting("features")
    with caplog.at_level(logging.WARNING):
        found = learnt(MOON(small_batches(), trains="features", mu=5.0), context, tasks)
    assert same(model_of(found), model_of(learnt(FedAvg(small_batches(), trains="features"), context, tasks)))
    assert found.state.client_storage_bytes == {}
    assert caplog.text.count("MOON is FedAvg") == 1


@pytest.mark.slow
def test_without_weight_it_is_fedavg_bit_for_bit(caplog):
    context, tasks = setting("images")
    plain = model_of(learnt(FedAvg(small_batches()), context, tasks))
    with caplog.at_level(logging.WARNING):
        off = learnt(MOON(small_batches(), mu=0.0), context, tasks)
    assert same(model_of(off), plain)
    assert off.state.client_storage_bytes == {}
    assert caplog.text == ""
    assert not same(model_of(learnt(MOON(small_batches()), context, tasks)), plain)


@pytest.mark.slow_cases("images-feature", "images-projection")
@pytest.mark.parametrize(
    ("trains", "representation"), [("images", "feature"), ("images", "projection"), ("features", "projection")]
)
def test_a_single_clients_last_model_is_the_broadcast_one_and_the_term_constant(trains, representation):
    context, tasks = setting(trains)
    one = [[clients[0]] for clients in tasks]
    knobs = {"trains": trains, "representation": representation, "width": 5}
    with_term, without = (learnt(MOON(small_batches(rounds=3), mu=mu, **knobs), context, one) for mu in (5.0, 0.0))
    assert same(model_of(with_term), model_of(without))


@pytest.mark.parametrize("representation", ["feature", "projection"])
def test_a_clients_first_round_is_fedavgs(representation):
    context, tasks = setting("images")
    once, knobs = small_batches(rounds=1), {"representation": representation, "width": 5}
    with_term, without = (learnt(MOON(once, mu=mu, **knobs), context, tasks[:1]) for mu in (5.0, 0.0))
    assert same(model_of(with_term), model_of(without))


@pytest.mark.slow
def test_a_body_that_freezes_after_the_first_task_is_told_and_left_alone(caplog):
    context, tasks = setting("images")
    with caplog.at_level(logging.WARNING):
        federation = learnt(MOON(small_batches(), frozen_stages=4, mu=5.0), context, tasks)
    assert caplog.text.count("MOON is FedAvg") == 1
    first = learnt(MOON(small_batches(), frozen_stages=4, mu=5.0), context, tasks[:1])
    body = {name: value for name, value in model_of(first).items() if name.startswith("body.")}
    assert all(torch.equal(model_of(federation)[name], value) for name, value in body.items())


# What is compared, and what a client keeps ----------------------------------------------------------------------------


def test_the_models_compared_are_the_broadcast_one_and_the_clients_last():
    context, tasks = tiny_context(), made_tasks([[9, 7], [8, 6]], classes=2)
    method, stream = MOON(small_batches(rounds=1)), images_stream(tasks)
    server, states, sent = method.server(context), {}, {}
    learn_image_task(
        method, context, server, stream[0], tasks[0], seen=lambda k, _, m: sent.update({k: dict(m)}), states=states
    )
    server.start_task(stream[1])
    broadcast, client = server.broadcast(stream[1], 0), method.client(context)
    shard = image_shard(0, 1, *tasks[1][0])
    client.take_over(shard, broadcast)
    objective = client.objective(shard, broadcast, states[0])
    known, earlier = objective._known.state(), objective._earlier.state()
    assert all(torch.equal(value, broadcast[name]) for name, value in known.items())
    assert all(torch.equal(earlier[name], value) for name, value in sent[0].items())
    assert any(not torch.equal(known[name], value) for name, value in earlier.items())


@pytest.mark.slow_cases("feature", "projection")
@pytest.mark.parametrize("representation", ["feature", "projection"])
def test_a_client_keeps_the_model_that_it_last_sent(representation):
    """Its bytes are the model's; a client that misses the second task keeps that of the first, with one head."""
    context, tasks = tiny_context(), made_tasks([[9, 7], [8, 0]], classes=2)
    method = MOON(small_batches(), representation=representation, width=5)
    server, states, sent = method.server(context), {}, {}
    for task, clients in zip(images_stream(tasks), tasks, strict=True):
        learn_image_task(
            method, context, server, task, clients, seen=lambda k, _, m: sent.update({k: dict(m)}), states=states
        )
    for k, state in states.items():
        assert {f"model.{name}" for name in sent[k]} == set(state)
        assert all(torch.equal(state[f"model.{name}"], value) for name, value in sent[k].items())
    assert not any(name.startswith("model.heads.1") for name in states[1])
    federation = learnt(method, context, tasks)
    assert federation.state.client_storage_bytes == {"model": sum(v.nbytes for v in model_of(federation).values())}


@pytest.mark.slow
def test_the_messages_are_fedavgs():
    context, tasks = setting("images")
    runs = [learnt(method, context, tasks) for method in (MOON(small_batches()), FedAvg(small_batches()))]
    first, second = ([(row.up_bytes, row.down_bytes) for row in run.state.ledger.uploads] for run in runs)
    assert first == second


# The projection ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [6, 4])
def test_clients_with_a_projection_on_features_train_one_after_the_other(width):
    """Its layers train too, also where they are as wide as the features."""
    training = Training(rounds=2, epochs=1, batch_size=8, lr=0.1)
    method = MOON(training=training, trains="features", representation="projection", width=width)
    tasks = feature_tasks(0, [3, 2], [[9, 8], [7, 9]])
    alone = learnt(method, feature_context(), tasks)
    asked = learnt(method, feature_context(), tasks, transport=lambda *parts: InProcess.of(*parts, parallel=2))
    assert same(model_of(alone), model_of(asked))
    assert asked.state.batched_turns["single_because"] == ["more than linear heads trains"]


def test_the_projection_is_two_layers_before_the_class_weights():
    context, tasks = setting("features")
    server = learnt(
        MOON(small_batches(), trains="features", representation="projection", width=5), context, tasks
    ).server
    value = {name: tensor.double().numpy() for name, tensor in server.model().items()}
    z = TASKS[1][0][0].numpy()
    hidden = np.maximum(z @ value["body.projection.0.weight"].T + value["body.projection.0.bias"], 0)
    r = hidden @ value["body.projection.2.weight"].T + value["body.projection.2.bias"]
    np.testing.assert_allclose(server.predict(TASKS[1][0][0]).numpy(), r @ value["W"] + value["bias"], atol=1e-5)
    assert value["W"].shape == (5, 6)
    # Both layers learn.
    start = MOON(trains="features", representation="projection", width=5).server(context).network.state()
    assert all(
        not torch.equal(start[name], tensor) for name, tensor in server.network.state().items() if "proj" in name
    )


def test_its_first_weights_are_the_same_everywhere_and_follow_from_the_seed():
    def start(seed: int):
        return (
            MOON(trains="features", representation="projection").server(feature_context(64, seed=seed)).network.state()
        )

    one, two = (
        start(0),
        MOON(trains="features", representation="projection").client(feature_context(64)).network.state(),
    )
    assert same(one, two)
    weight = one["body.projection.0.weight"]
    assert weight.shape == (256, 64)
    assert 0.9 / 8 < float(weight.abs().max()) <= 1 / 8
    assert not torch.equal(start(1)["body.projection.0.weight"], weight)


def test_its_bytes_go_both_ways():
    """On features of 512 numbers, 4 (256 512 + 256 + 256 256 + 256) more, and class weights of 256 numbers."""
    context, tasks = feature_context(512), feature_tasks(0, [3], [[6, 5]], inputs=512)
    once = small_batches(rounds=1)
    row = learnt(MOON(once, trains="features", representation="projection"), context, tasks).state.ledger.uploads[0]
    layers, head = 4 * (256 * 512 + 256 + 256 * 256 + 256), 4 * 3 * (256 + 1)
    assert (row.up_bytes, layers) == (layers + head + 8, 788_480)
    plain = learnt(FedAvg(once, trains="features"), context, tasks).state.ledger.uploads[0]
    assert row.down_bytes - plain.down_bytes == layers + head - 4 * 3 * (512 + 1)


@pytest.mark.slow
def test_stages_freeze_behind_the_projection():
    context, tasks = setting("images")
    method = MOON(small_batches(), representation="projection", width=5, frozen_stages=2)
    method.check(context, [3, 3])
    first, both = (model_of(learnt(method, context, tasks[:count])) for count in (1, 2))
    still = {
        name.split(".")[2] for name, value in first.items() if "backbone" in name and torch.equal(both[name], value)
    }
    assert still == {"stage1", "stage2"}
    with pytest.raises(UserError, match=r"method\.frozen_stages=5 is more than the network has"):
        MOON(representation="projection", frozen_stages=5).check(context, [3])


@pytest.mark.parametrize(
    ("name", "value"), [("mu", -1), ("tau", 0), ("representation", "feature_map"), ("width", 0), ("mu", float("nan"))]
)
def test_impossible_knobs_are_refused_with_their_key(name, value):
    with pytest.raises(UserError, match=rf"^method\.{name}="):
        typed_instance(MOON, {name: value}, "method")
