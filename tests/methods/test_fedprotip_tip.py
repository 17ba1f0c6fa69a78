"""Task identity prediction: separable and equal tasks, single samples and batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fcl_bench.methods.projection.task_identity import Tip
from fcl_bench.protocol.context import TestBatch
from fcl_bench.protocol.method import Server
from fcl_bench.randomness import seeded
from tests.methods.fedprotip_harness import (
    bases_of,
    fedprotip_of,
    linear_context,
    three_tasks,
)
from tests.methods.training_harness import (
    federation_of,
    image_tasks,
    images_stream,
    learn_images,
    tiny_context,
)


def blocks_of_pixels(
    rng: np.random.Generator, task: int, tasks: int, first: int, count: int, size: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of two classes with light in the pixels of one task only: subspaces that are orthogonal."""
    pixels = np.zeros((count, 3 * size * size))
    own = np.array_split(np.arange(3 * size * size), tasks)[task]
    which = np.arange(count) % 2
    centres = np.random.default_rng(task).integers(60, 200, (2, len(own)))
    pixels[:, own] = centres[which] + rng.integers(-30, 31, (count, len(own)))
    images = torch.from_numpy(pixels.reshape(count, 3, size, size).astype(np.uint8))
    return images, torch.from_numpy(first + which)


def separable(
    tip: Tip | None, sizes: list[list[int]], seed: int = 0
) -> tuple[Server, list[tuple[torch.Tensor, torch.Tensor]]]:
    """FedProTIP on such tasks, and a test set for each; black pixels are zero to the network."""
    rng, T = np.random.default_rng(seed), len(sizes)
    tasks = [[blocks_of_pixels(rng, t, T, 2 * t, n) for n in clients] for t, clients in enumerate(sizes)]
    with seeded(seed):
        weight = nn.init.orthogonal_(torch.empty(48, 48))
    context = linear_context(4, 48, weight=weight, mean=(0.0,) * 3, std=(1.0,) * 3)
    method = fedprotip_of({"weight_decay": 5e-4, "lr": 0.02}, frozen_stages=0, threshold=0.7, tip=tip)
    return learn_images(method, context, tasks), [blocks_of_pixels(rng, t, T, 2 * t, 60) for t in range(T)]


def routed_right(server: Server, tests: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    routes = [server.classify(TestBatch.of(images)).tasks for images, _ in tests]
    return float(np.mean([(tasks == t).double().mean() for t, tasks in enumerate(routes)]))


SAMPLE = Tip(route="sample", batch=64)
BATCH = Tip(route="batch", batch=64)


@pytest.mark.slow_cases("everyone")
@pytest.mark.parametrize(
    "sizes",
    [[[20, 20, 20]] * 4, [[20, 20, 0], [0, 20, 20], [20, 0, 20]], [[30, 0], [30, 0], [15, 15]], [[40], [1], [40]]],
    ids=["everyone", "clients miss tasks", "a late client", "one client, one sample"],
)
def test_tasks_in_subspaces_of_their_own_are_told_apart_sample_by_sample(sizes):
    server, tests = separable(SAMPLE, sizes)
    assert routed_right(server, tests) >= 0.95
    images, labels = (torch.cat(parts) for parts in zip(*tests, strict=True))
    together = server.classify(TestBatch.of(images))
    # One by one, the samples get what they get beside others.
    assert all(
        int(server.classify(TestBatch.of(images[i : i + 1])).tasks) == together.tasks[i]
        for i in range(0, len(images), 17)
    )
    masked = together.scores.masked_fill(
        torch.arange(together.scores.shape[1]) // 2 != together.tasks[:, None], -torch.inf
    )
    assert (masked.argmax(dim=1) == labels).double().mean() > 0.6


@pytest.mark.slow
def test_equal_tasks_are_routed_by_chance():
    """No method could do better; a better one would have looked at the labels."""
    right = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        centres = rng.integers(40, 216, (2, 3, 3, 3))

        def draw(task, count, centres=centres, rng=rng):
            which = np.arange(count) % 2
            pixels = (centres[which] + rng.integers(-40, 41, (count, 3, 3, 3))).clip(0, 255).astype(np.uint8)
            return torch.from_numpy(pixels), torch.from_numpy(2 * task + which)

        tasks = [[draw(task, 24) for _ in range(3)] for task in range(3)]
        server = learn_images(fedprotip_of({"lr": 0.02, "epochs": 1}, frozen_stages=0), linear_context(), tasks)
        right.append(routed_right(server, [draw(task, 300) for task in range(3)]))
    assert abs(np.mean(right) - 1 / 3) < 0.05
    assert all(abs(value - 1 / 3) < 0.12 for value in right)


def test_a_batch_of_one_task_is_routed_as_one_and_a_mixed_one_refused():
    server, tests = separable(BATCH, [[20, 20]] * 3)
    assert server.pure_batches == 64
    for task, (images, _) in enumerate(tests):
        prediction = server.classify(TestBatch.of(images, one_task=True))
        assert prediction.tasks.tolist() == [task] * len(images)
        with pytest.raises(ValueError, match=r"tip\.route=batch routes batches of one task"):
            server.classify(TestBatch.of(images))
    # One vector for the batch: the mean over its samples.
    samples, _ = separable(SAMPLE, [[20, 20]] * 3)
    assert samples.pure_batches is None
    mixed = torch.cat([tests[0][0][:2], tests[1][0][:40]])
    assert server.classify(TestBatch.of(mixed, one_task=True)).tasks.tolist() == [1] * 42
    assert samples.classify(TestBatch.of(mixed, one_task=True)).tasks.tolist() == [0] * 2 + [1] * 40


def test_without_tip_all_classes_compete_and_nothing_is_routed():
    server, tests = separable(None, [[20, 20]] * 3)
    routing, _ = separable(SAMPLE, [[20, 20]] * 3)
    for images, _ in tests:
        prediction = server.classify(TestBatch.of(images))
        assert prediction.tasks is None
        torch.testing.assert_close(prediction.scores, routing.classify(TestBatch.of(images)).scores, rtol=0, atol=0)
        torch.testing.assert_close(prediction.scores, server.predict(images), rtol=0, atol=0)
    assert not any(name.startswith("reference") for name in server.state_dict())


def test_stages_of_a_task():
    task = images_stream(three_tasks())[0]
    assert fedprotip_of().stages(task) == ["model", "model", "bases", "references"]
    assert fedprotip_of(tip=None).stages(task) == ["model", "model", "bases"]


UPDATED = Tip(route="batch", batch=64, references="updated")
#: Samples; client 2 has none of the first task, client 1 none of the last.
UNEVEN = [[12, 9, 0], [9, 9, 11], [12, 0, 9]]


@pytest.mark.slow
def test_updated_references_are_those_of_the_recorded_inputs_in_every_tasks_subspace():
    """FedProTIP 4.4, from the definition: the mean over a client's sampled inputs of ||U_t U_t' a||."""
    tasks = image_tasks(np.random.default_rng(0), [2, 2, 2], UNEVEN)
    made = federation_of(fedprotip_of(tip=UPDATED, columns=8), tiny_context(), tasks)
    made.run(lambda _: None)
    bases = [basis.double().numpy() for basis in bases_of(made.server)["heads"]]
    recorded = {}
    for name, inputs in made.transport.state_dict().items():
        client, kind, task = name.split(".")
        assert kind == "inputs"
        recorded[int(client), int(task)] = inputs.double().numpy()
    assert recorded.keys() == {(k, t) for t, sizes in enumerate(UNEVEN) for k, n in enumerate(sizes) if n}
    assert all(len(inputs) == min(8, UNEVEN[t][k]) for (k, t), inputs in recorded.items())
    references, known = made.server.votes()
    for k, t in np.ndindex(3, 3):
        assert bool(known[k, t]) == ((k, t) in recorded)
        # Client 1 takes no part in the last task, and so does not see its subspace.
        seen = 2 if k == 1 else 3
        for of in range(3):
            expected = 0.0
            if (k, t) in recorded and of < seen:
                shadow = recorded[k, t] @ bases[of] @ bases[of].T
                expected = float(np.linalg.norm(shadow, axis=1).mean())
            assert float(references[k, t, of]) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_updated_references_cost_a_row_for_every_task_that_a_client_knows():
    tasks = image_tasks(np.random.default_rng(0), [2, 2, 2], UNEVEN)
    made = federation_of(fedprotip_of(tip=UPDATED, columns=8), tiny_context(), tasks)
    ledger = made.run(lambda _: None).ledger
    sent = {(row.client, row.task): row.up_bytes for row in ledger.uploads if row.stage == "references"}
    # Tasks known so far, each a number and a row of t + 1.
    assert sent[0, 0] == 1 * (4 + 4)
    assert sent[0, 1] == 2 * (4 + 8)
    assert sent[0, 2] == 3 * (4 + 12)
    assert sent[2, 2] == 2 * (4 + 12)
    assert sent[1, 2] == 0


@pytest.mark.slow
def test_references_change_routes_and_nothing_else():
    """Training, bases and scores are the same bit for bit."""
    tasks = image_tasks(np.random.default_rng(1), [2, 2, 2], [[16, 16]] * 3)
    states = []
    for references in ("learnt", "updated"):
        tip = replace(UPDATED, references=references)
        made = federation_of(fedprotip_of(tip=tip, columns=8), tiny_context(), tasks)
        made.run(lambda _: None)
        states.append({name: value for name, value in made.server.model().items() if "reference" not in name})
        learnt = made.server.votes()[0]
        assert bool((learnt[:, 0, 1:] > 0).all()) == (references == "updated")
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.slow
def test_references_of_a_subset_of_clients():
    """4.4: as many clients as asked for, the same in every task if they have samples of it; the model is the same."""
    sizes = [[12, 9, 9, 8], [9, 9, 11, 0], [12, 10, 9, 8]]
    ends, voters = {}, {}
    for count in (None, 2, 9):
        tasks = image_tasks(np.random.default_rng(0), [2, 2, 2], sizes)
        made = federation_of(fedprotip_of(tip=Tip(clients=count), columns=8), tiny_context(), tasks)
        ledger = made.run(lambda _: None).ledger
        rows = {(row.task, row.client) for row in ledger.uploads if row.stage == "references" and row.up_bytes}
        voters[count] = [{client for task, client in rows if task == t} for t in range(3)]
        ends[count] = made.server.model()
        assert made.server.votes()[0].shape[0] == len(set.union(*voters[count]))
    assert voters[None] == voters[9] == [{0, 1, 2, 3}, {0, 1, 2}, {0, 1, 2, 3}]
    assert [len(who) for who in voters[2]] == [2, 2, 2]
    assert voters[2][0] == voters[2][2]
    assert voters[2][1] >= voters[2][0] - {3}
    assert voters[2] != [{0, 1}] * 3  # not the first ones by number
    for name in ends[2]:
        assert torch.equal(ends[2][name], ends[None][name])
