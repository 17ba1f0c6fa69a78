"""What travels between the halves of a method that trains, and what it costs."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from fcl_bench.backbones.timm_backbone import Adapters, Timm, Transform
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import Dataset, image_split
from fcl_bench.engine.ledger import Ledger
from fcl_bench.protocol.context import Context, TestBatch
from fcl_bench.protocol.message import Message
from tests.methods.plain_training import (
    cloned,
    differing,
    fedavg,
    made_tasks,
)
from tests.methods.training_harness import (
    federation_of,
    learn_images,
    tiny_context,
)


def tiny_sizes(context: Context) -> tuple[list[int], int]:
    """Numbers in each stage of the network (3x3 kernels, four per channel of a batch norm), and in a head of 2."""
    widths = [3, *(getattr(context.network.build(), stage)[0].out_channels for stage in context.network.stages)]
    return [9 * a * b + 4 * b for a, b in pairwise(widths)], 2 * context.inputs + 2


#: Samples; client 3 joins in the second task, client 2 in the third.
LATE = [[12, 9, 0, 0], [9, 9, 0, 11], [8, 0, 9, 8]]


@pytest.mark.parametrize("wire", ["float32", "float64"])
def test_bytes_up_and_down_are_a_hand_count_and_what_is_frozen_goes_down_once(wire):
    context = tiny_context(wire=wire)
    stages, head = tiny_sizes(context)
    method = fedavg(frozen_stages=2, frozen_heads=True)
    ledger = federation_of(method, context, made_tasks(LATE)).run(lambda _: None).ledger
    number = {"float32": 4, "float64": 8}[wire]
    for row in ledger.uploads:
        if not LATE[row.task][row.client]:
            assert (row.up_bytes, row.down_bytes) == (0, 0)
            continue
        trains = sum(stages) + head if row.task == 0 else sum(stages[2:]) + head
        assert row.up_bytes == trains * number + 8  # and the number of samples
        control = 8 + 8 + 4 * (row.task + 1)  # round, step size, classes per task; broadcasts are float32 always
        once = 0
        if row.task and row.round == 0:
            before = [t for t in range(1, row.task) if LATE[t][row.client]]
            # Stages freeze after task 0, then a head a task; a client that has been there since has some of it.
            once = (sum(stages[:2]) if not before else 0) + head * (row.task - (max(before) if before else 0))
        assert row.down_bytes == (trains + once) * 4 + control, row


def test_with_a_fraction_of_the_clients_each_still_pays_for_the_frozen_part_once():
    context = tiny_context()
    stages, head = tiny_sizes(context)
    tasks = made_tasks([[9] * 4, [9] * 4])
    method = fedavg(frozen_stages=1, frozen_heads=True, rounds=6, fraction=0.5)
    ledger = federation_of(method, context, tasks).run(lambda _: None).ledger
    came = {
        k: [row.down_bytes for row in ledger.uploads if row.task and row.client == k and row.up_bytes] for k in range(4)
    }
    assert sum(map(len, came.values())) == 6 * 2
    assert len({len(rows) for rows in came.values()}) > 1
    every = (sum(stages[1:]) + head) * 4 + 8 + 8 + 8
    for rows in came.values():
        assert rows[:1] == [every + (stages[0] + head) * 4][: len(rows)]
        assert all(size == every for size in rows[1:])


def test_nothing_is_kept_of_a_network_that_changes_whole():
    federation = federation_of(fedavg(), tiny_context(), made_tasks([[9, 9], [9, 9]]))
    ledger = federation.run(lambda _: None).ledger
    assert not any(ledger.cached.names.values())
    stages, head = tiny_sizes(federation.context)
    sizes = {(row.task, row.down_bytes) for row in ledger.uploads}
    assert sizes == {(t, (sum(stages) + head * (t + 1)) * 4 + 16 + 4 * (t + 1)) for t in (0, 1)}


def test_the_ledger_remembers_through_json_what_clients_keep():
    federation = federation_of(fedavg(frozen_stages=2, frozen_heads=True), tiny_context(), made_tasks(LATE))
    ledger = federation.run(lambda _: None).ledger
    assert set(ledger.cached.names[3]) >= {"heads.0.weight", "heads.1.bias", "body.stage2.1.running_var"}
    restored = Ledger(clients=4)
    restored.restore(json.loads(json.dumps(ledger.state())), ledger.tensors())
    assert (restored.uploads, restored.cached.names) == (ledger.uploads, ledger.cached.names)
    broadcast = Message(
        {"heads.0.weight": torch.zeros(7), "new": torch.zeros(3), "round": torch.tensor(0)},
        cached=["heads.0.weight", "new"],
    )
    assert [restored.cached.send(3, broadcast) for _ in range(2)] == [12 + 8, 8]
    new = Ledger(4)
    assert [new.cached.send(3, broadcast), restored.cached.send(3, Message({"round": torch.tensor(0)}))] == [
        28 + 12 + 8,
        8,
    ]


def adapters_context() -> Context:
    split = image_split([0, 1], ArrayImages(np.zeros((2, 16, 16, 3), dtype=np.uint8)))
    backbone = Timm("test_vit", pretrained=False, adapters=Adapters(3), transform=Transform())
    network = backbone.trainable(Dataset("made", split, split), seed=0)
    return dataclasses.replace(tiny_context(), network=network, inputs=network.dimension)


@pytest.mark.slow
def test_of_a_network_with_adapters_only_adapters_and_heads_travel_and_are_counted():
    context = adapters_context()
    federation = federation_of(fedavg(rounds=1), context, made_tasks([[4, 3]], size=16))
    start = cloned(federation.server.network.state_dict())
    ledger = federation.run(lambda _: None).ledger
    blocks, d, r = len(context.network.build().blocks), context.inputs, 3
    adapters = blocks * (2 * d * r + d + r)
    head = 2 * d + 2
    assert [row.up_bytes for row in ledger.uploads] == [(adapters + head) * 4 + 8] * 2
    assert [row.down_bytes for row in ledger.uploads] == [(adapters + head) * 4 + 16 + 4] * 2
    after = federation.server.network.state_dict()
    assert all(".mlp.down." in name or ".mlp.up." in name for name in differing(start, after))
    assert differing(start, after)
    assert set(federation.server.network_tensors) < set(after)


def test_a_half_precision_wire_rounds_the_models_and_still_learns():
    context = tiny_context(wire="bfloat16")
    tasks = made_tasks([[20, 12]])
    server = learn_images(fedavg(rounds=6), context, tasks)
    images, labels = (torch.cat([parts[i] for parts in tasks[0]]) for i in (0, 1))
    assert (server.predict(images).argmax(dim=1) == labels).float().mean() > 0.9


@pytest.mark.slow
def test_three_clients_together_learn_the_newest_task():
    tasks = made_tasks([[20, 12, 9]] * 2)
    server = learn_images(fedavg(rounds=6, epochs=2), tiny_context(), tasks)
    images, labels = (torch.cat([parts[i] for parts in tasks[1]]) for i in (0, 1))
    prediction = server.classify(TestBatch.of(images))
    assert prediction.tasks is None
    assert prediction.scores.shape == (len(labels), 4)
    assert (prediction.scores.argmax(dim=1) == labels).float().mean() > 0.95


def test_the_model_on_file_predicts_as_the_server_does():
    context, tasks = tiny_context(), made_tasks([[20, 12], [14, 9]])
    server = learn_images(fedavg(), context, tasks)
    model = server.model()
    body = context.network.build()
    body.load_state_dict(
        {name.removeprefix("body."): value for name, value in model.items() if name.startswith("body.")}
    )
    images = tasks[0][0][0]
    with torch.no_grad():
        scores = body.eval()((images / 255 - 0.5) / 0.5) @ model["W"] + model["bias"]
    torch.testing.assert_close(server.predict(images), scores, rtol=1e-4, atol=1e-5)
