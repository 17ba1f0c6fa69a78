"""FedGen: a step of each half against plain NumPy, limits, messages, and what a resumed run needs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.data_free.fedgen import FedGen, Generated, Generation
from fcl_bench.methods.data_free.generators.features import FeatureGenerator
from fcl_bench.methods.gradient.class_counts import COUNTS
from fcl_bench.methods.gradient.client import MODEL
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Heads
from tests.methods import fedgen_oracle as oracle
from tests.methods import whole_runs
from tests.methods.fedgen_harness import made_generator, plain
from tests.methods.harness import turn
from tests.methods.training_harness import (
    feature_tasks,
    image_shard,
    image_tasks,
    images_stream,
    one_head,
    tiny_context,
)
from tests.methods.whole_runs import feature_context, model_of, same

SIZES = [[9, 6, 0], [8, 1, 7], [6, 6, 6]]


def training(**knobs) -> Training:
    return Training(**{"rounds": 3, "epochs": 2, "batch_size": 4, "lr": 0.05, "momentum": 0.5, **knobs})


def fedgen(trains: str = "images", generator: dict | None = None, knobs: dict | None = None, **own) -> FedGen:
    return FedGen(
        training(**(knobs or {})), generator=Generation(**{"steps": 5, **(generator or {})}), trains=trains, **own
    )


def tasks_and_context(trains: str):
    if trains == "images":
        return image_tasks(np.random.default_rng(0), [2, 2, 2], SIZES), tiny_context()
    return feature_tasks(0, [2, 2, 2], SIZES), feature_context()


def learnt(method, trains: str):
    tasks, context = tasks_and_context(trains)
    return whole_runs.learnt(method, context, tasks)


# One step of each half ------------------------------------------------------------------------------------------------


def stepped_server(tasks, context, method):
    """The server before and after its first average, with the uploads that it took in."""
    server, client = method.server(context), method.client(context)
    [task] = images_stream(tasks)
    server.start_task(task)
    uploads = {}
    for round_ in range(2):
        broadcast = server.broadcast(task, round_)
        for k, parts in enumerate(tasks[0]):
            upload = turn(client, image_shard(k, 0, *parts), broadcast)
            uploads[k] = {**uploads.get(k, {}), **{name: value.double().numpy() for name, value in upload.items()}}
            server.absorb(k, upload)
        server.finish_round()
        if round_ == 0:
            before = plain(server.generator)
    return server, before, uploads


def test_one_server_step_is_adams_on_the_oracles_loss():
    """The gradient of a single step by finite differences of the oracle's whole loss; Adam's first step by hand."""
    tasks, context = feature_tasks(4, [3], [[12, 9]], inputs=4), feature_context(4)
    knobs = {"steps": 1, "hidden": 5, "noise": 2, "lr": 0.01, "weight_decay": 0.1}
    method = fedgen("features", knobs, {"batch_size": 8})
    recorded = []
    draw = FeatureGenerator.draw

    def recording(self, labels, generator=None):
        made, noise = draw(self, labels, generator)
        recorded.append((labels.numpy(), noise.double().numpy(), self.training))
        return made, noise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureGenerator, "draw", recording)
        server, before, uploads = stepped_server(tasks, context, method)
    [(labels, noise, trained)] = recorded
    assert trained
    counts = np.stack([np.bincount(y.numpy(), minlength=3) for _, y in tasks[0]])
    for k in (0, 1):
        assert uploads[k]["counts"].tolist() == counts[k].tolist()
    heads = [(uploads[k]["heads.0.weight"], uploads[k]["heads.0.bias"]) for k in (0, 1)]
    before = {name: value.astype(float) for name, value in before.items()}

    def total(G) -> float:
        made = oracle.generate(G, labels, noise, True)
        return oracle.teaching(made, labels, heads, counts)[0] + oracle.diversity(noise, made)

    after = plain(server.generator)
    for name in ("classes", "noise.weight", "norm.weight", "norm.bias", "out.weight", "out.bias"):
        gradient = np.zeros_like(before[name])
        for place in np.ndindex(gradient.shape):
            ends = []
            for sign in (1, -1):
                moved = before[name].copy()
                moved[place] += sign * 1e-5
                ends.append(total({**before, name: moved}))
            gradient[place] = (ends[0] - ends[1]) / 2e-5
        gradient += 0.1 * before[name]
        # Adam's first step is lr g / (|g| + 1e-8): its moments say more, since they are g's size.
        moments = server.state_dict()[f"_adam.{name}.exp_avg"].numpy()
        np.testing.assert_allclose(moments, 0.1 * gradient, atol=2e-6, err_msg=name)
        far = np.abs(gradient) > 1e-4
        np.testing.assert_allclose((before[name] - after[name])[far], 0.01 * np.sign(gradient[far]), rtol=1e-3)


def objective_at(generator, available, alpha=3.0, beta=2.0, steps=10, count=6) -> Generated:
    heads = Heads(((0, 1, 2),), (0, 1, 2))
    method = fedgen(knobs={"batch_size": 4}, alpha=alpha, beta=beta, generated=count)
    return Generated(heads, method, generator, available, 0, steps, seed=11)


@pytest.mark.parametrize(("alpha", "beta"), [(3.0, 2.0), (0.0, 2.0), (3.0, 0.0)])
def test_the_clients_loss_and_gradient_are_those_of_the_equations(alpha, beta):
    rng = np.random.default_rng(6)
    network, generator = one_head(rng, 3), made_generator(classes=3).eval()
    Z, labels = rng.standard_normal((4, 4)), np.array([0, 2, 1, 2])
    recorded = []
    draw = FeatureGenerator.draw

    def recording(self, classes, draws=None):
        noise = torch.randn((len(classes), self.inputs), generator=draws).double()
        recorded.append((classes.numpy(), noise.numpy()))
        return self(classes, noise), noise

    objective = objective_at(generator, torch.tensor([0, 2]), alpha, beta)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureGenerator, "draw", recording)
        loss = objective.loss(network, torch.from_numpy(Z), torch.from_numpy(labels))
    assert FeatureGenerator.draw is draw
    loss.backward()
    none = (np.array([0]), np.zeros((1, 3)))
    (own, own_noise), (drawn, noise) = (recorded[0] if beta else none), (recorded[-1] if alpha else none)
    G = plain(generator)
    W, b = (parameter.detach().numpy() for parameter in network.heads[0].parameters())
    assert set(drawn.tolist()) <= {0, 2}
    of_labels = oracle.generate(G, own, own_noise, False) if beta else Z
    made = oracle.generate(G, drawn, noise, False)
    if beta:
        assert own.tolist() == labels.tolist()
    if alpha:
        assert len(drawn) == 6
    given = (W, b, Z, labels, of_labels, made, drawn, alpha, beta, 6 / 4)
    assert loss.item() == pytest.approx(oracle.client_loss(*given), abs=1e-6)
    for found, expected in zip(network.heads[0].parameters(), oracle.client_gradient(*given), strict=True):
        np.testing.assert_allclose(found.grad.numpy(), expected, atol=1e-6)


def test_after_the_first_epochs_a_client_minimises_its_own_loss_alone():
    rng = np.random.default_rng(7)
    network, generator = one_head(rng, 3), made_generator(classes=3).eval()
    Z, labels = torch.from_numpy(rng.standard_normal((4, 4))), torch.tensor([0, 2, 1, 2])
    objective = objective_at(generator, torch.tensor([0, 1, 2]), steps=2)
    own = torch.nn.functional.cross_entropy(network(Z), labels).item()
    found = [objective.loss(network, Z, labels).item() for _ in range(4)]
    assert found[0] != own != found[1]
    assert found[2:] == [own, own]


def test_the_generated_epochs_are_counted_in_steps_of_the_clients_own_batches():
    """9 samples in batches of 4 are two steps, since batch norm takes no single sample."""
    method, context = fedgen("features", generated_epochs=1), feature_context()
    tasks = feature_tasks(0, [2], [[9, 12]])
    server, client = method.server(context), method.client(context)
    [task] = images_stream(tasks)
    server.start_task(task)
    steps = []
    for round_ in range(3):
        broadcast = server.broadcast(task, round_)
        for k, parts in enumerate(tasks[0]):
            client_data = image_shard(k, 0, *parts)
            server.absorb(k, turn(client, client_data, broadcast))
            if round_ == 2:
                steps.append(client.objective(client_data, broadcast, {})._steps)
        server.finish_round()
    assert steps == [2, 3]


def test_both_weights_decay_by_round_and_end_at_a_least_one():
    method = FedGen(alpha=10.0, beta=2.0)
    assert method.decayed(10.0, 0) == 10
    assert method.decayed(2.0, 3) == pytest.approx(2 * 0.98**3)
    assert method.decayed(2.0, 5000) == 1e-4
    assert method.decayed(0.0, 5) == 0


# Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("features", "images")
@pytest.mark.parametrize("trains", ["images", "features"])
def test_without_both_terms_it_is_fedavg_bit_for_bit_and_nothing_is_generated(trains):
    method = fedgen(trains, alpha=0.0, beta=0.0)
    federation, other = learnt(method, trains), learnt(FedAvg(training(), trains=trains), trains)
    assert same(model_of(federation), model_of(other))
    assert federation.server.generator.classes.shape[0] == 0
    bytes_of = [[(r.stage, r.up_bytes, r.down_bytes) for r in f.state.ledger.uploads] for f in (federation, other)]
    assert bytes_of[0] == bytes_of[1]
    for alpha, beta in ((1.0, 0.0), (0.0, 1.0)) if trains == "features" else ((1.0, 1.0),):
        assert not same(model_of(learnt(fedgen(trains, alpha=alpha, beta=beta), trains)), model_of(other))


@pytest.mark.slow
def test_messages_have_the_bytes_of_the_formulas():
    trains, d, h, N = "features", 6, 8, 3
    federation = learnt(fedgen(trains, {"hidden": h, "noise": N}), trains)
    plain_one = learnt(FedAvg(training(), trains=trains), trains)
    fedavg = {(r.task, r.round, r.client): r for r in plain_one.state.ledger.uploads}
    told = set()
    for row in federation.state.ledger.uploads:
        if not row.up_bytes:
            continue
        C, classes = 2 * (row.task + 1), 2
        if row.stage == COUNTS:
            assert row.up_bytes == 4 * classes
            assert row.down_bytes == 4 * (row.task + 1)  # the sizes of the heads
            continue
        assert row.stage == MODEL
        beside = fedavg[row.task, row.round - 1, row.client]
        assert row.up_bytes == beside.up_bytes
        # Client 1 has a single sample of task 1, but every class is somebody's.
        labels = 0 if (row.task, row.client) in told else 4 * classes
        generator = 4 * (h * (C + N + 1) + 4 * h + d * (h + 1))
        if row.round == 1:
            assert row.down_bytes == beside.down_bytes
        else:
            assert row.down_bytes == beside.down_bytes + generator + labels
            told.add((row.task, row.client))
    assert federation.server.report()["generator_bytes"] == generator


def test_the_server_keeps_heads_of_one_round_only_and_of_them_nothing_else():
    tasks, context = tasks_and_context("images")
    method = fedgen()
    server, client = method.server(context), method.client(context)
    [task] = images_stream(tasks[:1])
    server.start_task(task)
    for round_ in range(3):
        broadcast = server.broadcast(task, round_)
        for k in (0, 1):
            server.absorb(k, turn(client, image_shard(k, 0, *tasks[0][k]), broadcast))
        kept = [sum(value.nbytes for value in heads.values()) for heads in server._heads.values()]
        assert kept == ([] if round_ == 0 else [4 * 2 * (context.inputs + 1)] * 2)
        server.finish_round()
        assert server._heads == {}


def test_a_generator_that_no_class_qualifies_for_is_neither_taught_nor_sent():
    """One sample of each class for each client: nobody has two."""
    rng = np.random.default_rng(0)
    Z = torch.from_numpy(rng.standard_normal((4, 6)))
    tasks = [[(Z[:2], torch.tensor([0, 1])), (Z[2:], torch.tensor([0, 1]))]]
    federation = whole_runs.learnt(fedgen("features"), feature_context(), tasks)
    other = whole_runs.learnt(FedAvg(training(), trains="features"), feature_context(), tasks)
    assert federation.server.taught == -1
    assert same(model_of(federation), model_of(other))


@pytest.mark.slow
def test_classes_of_one_logit_in_an_old_head_are_generated_too():
    """Class 1 comes back in task 1: its logit is in the first head, its column in the second task."""
    rng = np.random.default_rng(1)
    Z = torch.from_numpy(rng.standard_normal((24, 6)))
    tasks = [[(Z[:12], torch.arange(12) % 2)], [(Z[12:], 1 + torch.arange(12) % 2)]]
    for over in ("seen", "task"):
        federation = whole_runs.learnt(fedgen("features", loss_classes=over), feature_context(), tasks)
        assert federation.server.taught == 1
        assert federation.server.tasks == [(0, 1), (1, 2)]
        assert federation.server.counts[0].tolist() == [6, 6]
        assert all(bool(torch.isfinite(value).all()) for value in model_of(federation).values())
