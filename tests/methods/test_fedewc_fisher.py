"""FedEWC's Fisher information: pooled over clients, added up over tasks, of the right model and classes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fcl_bench.engine.codec import encoded
from fcl_bench.methods.averaging.fedewc import FISHER, FedEWC
from fcl_bench.protocol.message import Message
from tests.methods.classical_harness import INPUTS, feature_tasks, federation, pictures, training
from tests.methods.classical_oracle import fisher_sum
from tests.methods.harness import take_in, turn
from tests.methods.training_harness import image_shard, images_stream, learn_images, tiny_context
from tests.methods.whole_runs import feature_context


def answers(method: FedEWC, parts: list, order: list[int] | None = None, context=None):
    """The server after the stage, where the model is always that of the whole stream's first task."""
    context = context or tiny_context()
    server, client = method.server(context), method.client(context)
    task = images_stream([parts])[0]
    server.start_task(task)
    number = method.stages(task).index(FISHER)
    broadcast, sent = server.broadcast(task, number), {}
    for k in order or range(len(parts)):
        if len(parts[k][1]):
            sent[k] = turn(client, image_shard(k, 0, *parts[k]), broadcast)
            take_in(server, k, encoded(sent[k], context.wire), task, number)
    server.finish_round()
    return server, sent


def test_it_is_that_of_the_pooled_samples_however_they_are_dealt():
    (images, labels), _, _ = pictures()[0]
    more, theirs = pictures()[0][1]
    images, labels = torch.cat([images, more]), torch.cat([labels, theirs])
    method = FedEWC(training(), normalise="none")
    pooled, _ = answers(method, [(images, labels)])
    assert pooled.fisher.keys() == {name for name, _ in pooled.network.named_parameters()}
    chance = np.random.default_rng(0).permutation(len(labels))
    for cut, order in (([1, 2], [2, 0, 1]), ([7, 7], [0, 2]), ([20, 22], None)):
        parts = [(images[chosen], labels[chosen]) for chosen in np.split(chance, cut)]
        server, sent = answers(method, parts, order)
        assert [sent[k].samples for k in sorted(sent)] == [len(y) for _, y in parts if len(y)]
        for name, F in pooled.fisher.items():
            torch.testing.assert_close(server.fisher[name], F, rtol=1e-4, atol=1e-9)


def test_it_adds_up_over_tasks_with_gamma_and_is_clipped():
    """F <- min(gamma F + F_t, fisher_max), by uploads that are made up."""
    method = FedEWC(training(), trains="features", gamma=0.5, normalise="none", fisher_max=3.0)
    server, told = method.server(feature_context(2)), []
    for task in images_stream(feature_tasks(inputs=2)):
        server.start_task(task)
        server.broadcast(task, 2)
        for number, samples in ((4.0, 1), (20.0, 7)):
            made = {name: torch.full_like(own, number).double() for name, own in server.matching("*").items()}
            server.absorb(0, Message(made, samples=samples))
        server.finish_round()
        told.append({name: float(F.mean()) for name, F in server.fisher.items()})
    assert told[0] == {"heads.0.weight": 3.0, "heads.0.bias": 3.0}
    assert told[1] == {**told[0], "heads.1.weight": 3.0, "heads.1.bias": 3.0}
    free = dataclasses.replace(method, fisher_max=None)
    server, told = free.server(feature_context(2)), []
    for task in images_stream(feature_tasks(inputs=2)):
        server.start_task(task)
        server.broadcast(task, 2)
        made = {name: torch.full(own.shape, 6.0) for name, own in server.matching("*").items()}
        server.absorb(0, Message(made, samples=2))
        server.finish_round()
        told.append({name: float(F.mean()) for name, F in server.fisher.items() if name.endswith("bias")})
    assert told == [
        {"heads.0.bias": 3.0},
        {"heads.0.bias": 4.5, "heads.1.bias": 3.0},
        {"heads.0.bias": 5.25, "heads.1.bias": 4.5, "heads.2.bias": 3.0},
    ]
    assert server.report()["fisher"]["largest"] == 5.25
    assert server.report()["fisher"]["at_maximum"] == 0


@pytest.mark.parametrize("recurring", [False, True])
def test_it_is_of_the_model_after_the_task_over_the_classes_that_compete(recurring):
    tasks, told = feature_tasks(recurring), []
    method = FedEWC(training(), trains="features", loss_classes="task", normalise="none", gamma=0.0, strength=1e-9)
    server = learn_images(
        method, feature_context(INPUTS), tasks, after=lambda _, server: told.append(dict(server.fisher))
    )
    state = server.network.state()
    parts = [torch.cat([state[f"heads.{h}.weight"], state[f"heads.{h}.bias"][:, None]], 1) for h in range(3)]
    X = np.vstack([np.hstack([Z.numpy(), np.ones((len(Z), 1))]) for Z, _ in tasks[-1]])
    labels = np.concatenate([y.numpy() for _, y in tasks[-1]])
    expected = fisher_sum(X, labels, torch.cat(parts).double().numpy(), np.unique(labels)) / len(labels)
    found = torch.cat(
        [torch.cat([told[-1][f"heads.{h}.weight"], told[-1][f"heads.{h}.bias"][:, None]], 1) for h in range(3)]
    )
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-3, atol=1e-7)
    # A class that came back is looked at again.
    assert bool(found[: -len(server.columns[-1])].any()) == recurring


@pytest.mark.slow_cases("float16")
@pytest.mark.parametrize("wire", ["float16", "bfloat16", "float32"])
def test_it_survives_any_wire(wire):
    found = federation(FedEWC(training()), context=tiny_context(wire=wire))
    assert all(torch.isfinite(F).all() and (F >= 0).all() for F in found.server.fisher.values())


def test_what_never_trains_again_is_not_measured_and_frozen_rows_rest():
    tasks = feature_tasks(recurring=True)
    method = FedEWC(training(), frozen_stages=2, frozen_heads=True, strength=10.0)
    server, _ = answers(method, pictures()[0])
    assert {name.split(".")[1] for name in server.fisher} == {"stage3", "stage4", "0"}
    heads = []
    frozen = FedEWC(training(), trains="features", frozen_heads=True, strength=10.0)
    learn_images(
        frozen,
        feature_context(INPUTS),
        tasks,
        after=lambda _, s: heads.append(s.network.heads[0].weight.detach().clone()),
    )
    assert torch.equal(heads[1][:2], heads[0][:2])
    assert not torch.equal(heads[1][2], heads[0][2])
    assert torch.equal(heads[2], heads[1])
