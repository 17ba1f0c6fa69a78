"""Queries that are computed once: how often the ViT runs without a prompt, and that nothing else comes of it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from fcl_bench.data.images.batches import Samples
from fcl_bench.methods.transformers import prompts as shared
from fcl_bench.methods.transformers.dualprompt import DualPrompt
from fcl_bench.methods.transformers.l2p import L2P
from fcl_bench.methods.transformers.prompts import PromptedViT
from fcl_bench.protocol.context import TestBatch
from tests.methods.harness import turn
from tests.methods.prompt_harness import SIZES, context, pictures, run_of, training
from tests.methods.training_harness import image_shard, images_stream, learn_images
from tests.methods.whole_runs import model_of

MADE = {
    "dualprompt": lambda **knobs: DualPrompt(training(**knobs), e_layers=[2, 3], g_length=4, e_length=4),
    "l2p": lambda **knobs: L2P(training(**knobs), pool=5, length=4, top=2),
}


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """Of each forward pass without a prompt, the images."""
    counts: list[int] = []
    plain = PromptedViT.queries

    def queries(self, images):
        counts.append(len(images))
        return plain(self, images)

    monkeypatch.setattr(PromptedViT, "queries", queries)
    return counts


@pytest.mark.slow_cases("dualprompt", "l2p")
@pytest.mark.parametrize("name", MADE)
def test_known_queries_change_nothing_but_rounding(name, monkeypatch):
    knobs = {"rounds": 3, "epochs": 2, "batch_size": 4}
    known = model_of(run_of(MADE[name](**knobs)))
    monkeypatch.setattr(
        shared.PromptClient, "samples", lambda self, client_data, *_: Samples(client_data.inputs, client_data.labels)
    )
    computed = model_of(run_of(MADE[name](**knobs)))
    assert known.keys() == computed.keys()
    for key, value in known.items():
        torch.testing.assert_close(value, computed[key], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_each_client_computes_its_queries_once_in_a_task(asked):
    learn_images(MADE["dualprompt"](rounds=4, epochs=3), context(), pictures())
    assert sorted(asked) == sorted(size for sizes in SIZES for size in sizes if size)


@pytest.mark.slow
def test_augmented_images_are_asked_about_at_every_step(asked):
    learn_images(MADE["dualprompt"](rounds=2, epochs=3, augment="crop"), context(), pictures())
    assert sum(asked) == 2 * 3 * sum(map(sum, SIZES))


def test_queries_of_earlier_tasks_are_forgotten():
    method, given, tasks = MADE["l2p"](), context(), pictures()
    server, client = method.server(given), method.client(given)
    for task, clients in zip(images_stream(tasks), tasks, strict=True):
        server.start_task(task)
        for k, (images, labels) in enumerate(clients):
            if len(labels):
                turn(client, image_shard(k, task.index, images, labels), server.broadcast(task, 0))
        present = {k: len(labels) for k, (_, labels) in enumerate(clients) if len(labels)}
        assert {k: len(values) for k, values in client._queries.items()} == present


def test_each_batch_is_told_its_own_queries():
    """Other queries would be other prompts: shuffled batches, the last of which is smaller."""
    method, given, tasks = MADE["l2p"](batch_size=4), context(), pictures()
    server, client = method.server(given), method.client(given)
    [task, *_] = images_stream(tasks)
    server.start_task(task)
    client_data = image_shard(0, 0, *tasks[0][0])
    broadcast = server.broadcast(task, 0)
    client.take_over(client_data, broadcast)
    samples, body = client.samples(client_data, broadcast, {}), client.network.body
    sizes = []
    for images, _ in samples.batches(4, client.trainer.augment, torch.Generator().manual_seed(3)):
        told, body._expected = body._expected, None
        torch.testing.assert_close(told, body.queries(client.trainer.standardise(images)), atol=1e-6, rtol=1e-5)
        sizes.append(len(images))
    assert sizes == [4, 4, 3]


def test_the_server_asks_once_about_a_batch_that_comes_back(asked):
    server = learn_images(MADE["dualprompt"](), context(), pictures())
    images = torch.cat([images for clients in pictures() for images, _ in clients])
    asked.clear()
    fresh = server.classify(TestBatch.of(images)).scores
    first = server.classify(TestBatch(lambda: images, number=3)).scores
    again = server.classify(TestBatch(lambda: images, number=3)).scores
    assert sum(asked) == 2 * len(images)
    assert torch.equal(first, fresh)
    assert torch.equal(again, fresh)
    # Of another batch there are none as yet.
    assert torch.equal(server.classify(TestBatch(lambda: images[:4], number=4)).scores, server.predict(images[:4]))
    # Prompts have changed, queries have not.
    server.network.body.prompts.G.data += 0.5
    later = server.classify(TestBatch(lambda: images, number=3)).scores
    assert not torch.allclose(later, fresh)
    assert torch.equal(later, server.predict(images))


def test_a_network_that_has_trained_can_be_copied():
    """What autograd kept of a penalty could not."""
    method, given, tasks = MADE["dualprompt"](), context(), pictures()
    server, client = method.server(given), method.client(given)
    [task, *_] = images_stream(tasks)
    server.start_task(task)
    turn(client, image_shard(0, 0, *tasks[0][0]), server.broadcast(task, 0))
    images = torch.from_numpy(np.zeros((2, 3, 8, 8), dtype=np.float32))
    copied = copy.deepcopy(client.network).eval()
    assert torch.equal(copied(images), client.network.eval()(images))
    assert not torch.equal(client.frozen_copy().body.prompts.G, server.network.body.prompts.G)
