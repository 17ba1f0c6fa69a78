"""Methods that train: FedAvg against plain loops, what freezes, what travels and what it costs, who takes part."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from fcl_bench.data.batches import Augment, Standardise, epoch_batches
from fcl_bench.data.images import ArrayImages
from fcl_bench.data.sources import Dataset, image_split
from fcl_bench.data.stream import Task
from fcl_bench.errors import UserError
from fcl_bench.features.adapters import Adapters
from fcl_bench.features.timm_backbone import Timm, Transform
from fcl_bench.federation.ledger import Ledger
from fcl_bench.federation.local_training import Training
from fcl_bench.federation.message import Message
from fcl_bench.methods.base import Problem
from fcl_bench.methods.finetune import FineTune
from fcl_bench.methods.joint_training import JointTraining
from fcl_bench.randomness import derived_seed
from tests.methods.training_harness import (
    CPU,
    ImageTasks,
    federation_of,
    image_shard,
    image_tasks,
    images_stream,
    learn_images,
    tiny_problem,
)

STAGE = ("0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var")
FAST = {"rounds": 2, "epochs": 1, "batch_size": 8, "lr": 0.05, "augment": "none"}


def finetune(**knobs) -> FineTune:
    """`training` knobs and the method's own."""
    own = {name: knobs.pop(name) for name in ("frozen_stages", "frozen_heads", "loss_over") if name in knobs}
    return FineTune(training=Training(**{**FAST, **knobs}), **own)


def made_tasks(sizes: list[list[int]], classes: int = 2, size: int = 8, seed: int = 0) -> ImageTasks:
    return image_tasks(np.random.default_rng(seed), [classes] * len(sizes), sizes, size)


def resnet_problem() -> Problem:
    split = image_split([0, 1], ArrayImages(np.zeros((2, 16, 16, 3), dtype=np.uint8)))
    transform = Transform(size=16, crop_pct=1.0, mean=[0.5, 0.4, 0.6], std=[0.25, 0.3, 0.2])
    backbone = Timm("test_resnet", pretrained=False, stem="cifar", transform=transform)
    network = backbone.trainable(Dataset("made", split, split), seed=1)
    return dataclasses.replace(tiny_problem(), network=network, inputs=network.dimension)


def cloned(tensors) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in tensors.items()}


def state_of(server) -> dict[str, torch.Tensor]:
    return cloned(server.network.state())


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in first if not torch.equal(first[name], second[name])}


# The oracle: one network, torch's own SGD, no federation --------------------------------------------------------------


class Plain(torch.nn.Module):
    """A body and a head per task, as the first lines of any tutorial have it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.body = problem.network.build()
        self.heads = torch.nn.ModuleList()
        self.seed = derived_seed(problem.seed, "heads") % 2**62

    def add_head(self, classes: int) -> None:
        head = torch.nn.Linear(self.dimension, classes)
        uniform = torch.rand(
            classes, self.dimension, generator=torch.Generator().manual_seed(self.seed + len(self.heads))
        )
        head.load_state_dict({"weight": (2 * uniform - 1) / self.dimension**0.5, "bias": torch.zeros(classes)})
        self.heads.append(head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.body(x)
        return torch.cat([head(features) for head in self.heads], dim=1)


def plainly(problem: Problem, knobs: Training, data: list, joint: bool = False) -> Plain:
    """SGD over each task's (images, labels), one client; joint: over all so far, from scratch at every task."""
    start = problem.network
    augment, standardise = Augment(knobs.augment), Standardise(start.size, start.mean, start.std)
    model = Plain(problem)
    sizes: list[int] = []
    for task, (images, labels) in enumerate(data):
        sizes.append(int(labels.max()) + 1 - sum(sizes))
        if joint:
            model = Plain(problem)
            images, labels = (torch.cat([part[i] for part in data[: task + 1]]) for i in (0, 1))
        model.dimension = start.dimension
        while len(model.heads) < len(sizes):
            model.add_head(sizes[len(model.heads)])
        model.to(memory_format=torch.channels_last).train()
        for round_ in range(knobs.rounds):
            where = (task, round_) if joint else (task, round_, 0)
            generator = torch.Generator().manual_seed(derived_seed(problem.seed, "training", *where))
            optimiser = torch.optim.SGD(
                model.parameters(), lr=knobs.rate(round_), momentum=knobs.momentum, weight_decay=knobs.weight_decay
            )
            for _ in range(knobs.epochs):
                for chosen in epoch_batches(len(images), knobs.batch_size, generator):
                    x = standardise(augment(images[chosen], generator))
                    optimiser.zero_grad()
                    torch.nn.functional.cross_entropy(model(x), labels[chosen]).backward()
                    optimiser.step()
    return model


@pytest.mark.parametrize(
    ("network", "dtype"), [("tiny", torch.float32), ("tiny", torch.float64), ("resnet", torch.float64)]
)
def test_fedavg_of_one_client_is_plain_sgd_bit_for_bit(network, dtype):
    """Over rounds and tasks, with everything on: momentum (anew in every round), decay, schedule, augmentation."""
    problem = dataclasses.replace({"tiny": tiny_problem, "resnet": resnet_problem}[network](), dtype=dtype)
    tasks = made_tasks([[30], [21]], size=problem.network.size)
    knobs = Training(
        rounds=3,
        epochs=2,
        batch_size=10,
        lr=0.05,
        momentum=0.9,
        weight_decay=5e-3,
        schedule="cosine",
        augment="crop_flip",
    )
    server = learn_images(FineTune(training=knobs), problem, tasks)
    plain = plainly(problem, knobs, [clients[0] for clients in tasks]).state_dict()
    for name, value in server.network.state().items():
        assert torch.equal(value, plain[name]), name
    assert len(server.network.state()) == sum("num_batches" not in name for name in plain)


# The average ----------------------------------------------------------------------------------------------------------


def uploads_of(method: FineTune, problem: Problem, clients: list) -> tuple:
    """The server in its first round, and each client's upload on the wire."""
    server, client = method.server(problem), method.client(problem)
    task = images_stream([clients])[0]
    server.start_task(task)
    broadcast = server.broadcast(task, 0)
    messages = [
        Message(cloned(client.update(image_shard(k, 0, *shard), broadcast).to_wire(problem.wire)))
        for k, shard in enumerate(clients)
    ]
    return server, messages


def averaged(server, messages: list[Message], problem: Problem, order: list[int] | None = None) -> dict:
    server.broadcast(Task(0, range(2), 2), 0)
    for k in order or range(len(messages)):
        server.absorb(k, messages[k].from_wire(problem.dtype, CPU))
    server.finish_round()
    return state_of(server)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("counts", [[1, 1, 1], [7, 13, 1], [1, 3, 5000]])
def test_equal_models_average_to_themselves_bit_for_bit(weighting, dtype, counts):
    problem = tiny_problem(dtype=dtype)
    server, [message] = uploads_of(finetune(weighting=weighting), problem, made_tasks([[20]])[0])
    same = [Message({**message, "samples": torch.tensor(count)}) for count in counts]
    found = averaged(server, same, problem)
    assert set(found) == set(message) - {"samples"}
    assert all(torch.equal(value, message[name]) for name, value in found.items())


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_average_is_the_weighted_mean_running_statistics_included(weighting, dtype):
    problem, counts = tiny_problem(dtype=dtype), [9, 40, 1, 17]
    server, messages = uploads_of(finetune(weighting=weighting), problem, made_tasks([counts])[0])
    assert [int(message["samples"]) for message in messages] == counts
    found = averaged(server, messages, problem)
    shares = np.array(counts if weighting == "samples" else [1] * 4, dtype=np.float64)
    for name, value in found.items():
        models = np.stack([message[name].double().numpy() for message in messages])
        expected = np.tensordot(shares / shares.sum(), models, axes=1)
        np.testing.assert_allclose(value.double().numpy(), expected, rtol=1e-7, atol=1e-12, err_msg=name)
    assert {f"body.stage4.{name}" for name in STAGE} <= set(found)
    spread = messages[0]["body.stage1.1.running_var"] - messages[1]["body.stage1.1.running_var"]
    assert bool(spread.any())


def test_the_order_of_the_clients_does_not_matter():
    problem, counts = tiny_problem(), [9, 40, 1, 17]
    server, messages = uploads_of(finetune(), problem, made_tasks([counts])[0])
    first = averaged(server, messages, problem)
    second = averaged(server, messages, problem, order=[2, 0, 3, 1])
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=2e-7, atol=1e-12)


def test_a_round_without_an_upload_leaves_the_model():
    problem = tiny_problem()
    server, _ = uploads_of(finetune(), problem, made_tasks([[5]])[0])
    before = state_of(server)
    assert not differing(before, averaged(server, [], problem))


def test_every_round_starts_from_the_average_of_the_one_before():
    problem, tasks, sent, sums = tiny_problem(), made_tasks([[8, 24]]), [], {}

    def seen(k, broadcast, message):
        round_ = int(broadcast["round"])
        sent.append((round_, broadcast["body.stage1.0.weight"].double()))
        share = len(tasks[0][k][1]) / 32
        sums[round_] = sums.get(round_, 0) + share * message["body.stage1.0.weight"].double()

    learn_images(finetune(rounds=3), problem, tasks, seen=seen)
    assert [round_ for round_, _ in sent] == [0, 0, 1, 1, 2, 2]
    for round_, model in sent:
        if round_:
            torch.testing.assert_close(model, sums[round_ - 1], rtol=1e-7, atol=1e-12)


def test_the_clients_half_keeps_nothing():
    """Whatever a client half did before, its answer to a shard and a broadcast is the same."""
    problem, tasks = tiny_problem(), made_tasks([[20, 14]])
    method = finetune()
    server, [first, second] = uploads_of(method, problem, tasks[0])
    broadcast = server.broadcast(images_stream(tasks)[0], 0)
    again = method.client(problem).update(image_shard(1, 0, *tasks[0][1]), broadcast)
    assert all(torch.equal(value, second[name]) for name, value in again.items())
    assert not torch.equal(first["heads.0.weight"], second["heads.0.weight"])


def test_step_sizes_are_told_by_the_server():
    told = {}
    learn_images(
        finetune(rounds=4, lr=0.2, schedule="step", milestones=[1, 3], decay=0.5),
        tiny_problem(),
        made_tasks([[8], [8]]),
        seen=lambda _, broadcast, __: told.setdefault(len(broadcast["classes"]), []).append(float(broadcast["rate"])),
    )
    assert told == {1: [0.2, 0.1, 0.1, 0.05], 2: [0.2, 0.1, 0.1, 0.05]}


# Who takes part -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "clients", "expected"),
    [(1.0, 7, 7), (0.5, 7, 4), (0.3, 7, 2), (0.01, 7, 1), (0.1, 20, 2), (0.9, 1, 1)],
)
def test_the_right_number_takes_part(fraction, clients, expected):
    method = finetune(fraction=fraction, rounds=5)
    server = method.server(tiny_problem())
    available = [3 * k for k in range(clients)]
    for round_ in range(5):
        present = server.participants(Task(0, range(2), 2), round_, available)
        assert len(present) == len(set(present)) == expected
        assert set(present) <= set(available)
        assert present == sorted(present)


def drawn(seed: int, task: int = 0) -> list[list[int]]:
    server = finetune(fraction=0.3, rounds=40).server(tiny_problem(seed=seed))
    return [server.participants(Task(task, range(2), 2), round_, list(range(10))) for round_ in range(40)]


def test_participants_follow_from_the_seed_and_change_with_round_and_task():
    first = drawn(0)
    assert drawn(0) == first
    assert drawn(1) != first
    assert drawn(0, task=1) != first
    assert len({tuple(present) for present in first}) > 20
    assert set(Counter(k for present in first for k in present)) == set(range(10))


def test_only_clients_with_labelled_samples_take_part():
    tasks = made_tasks([[20, 0, 9, 0, 9, 14, 0, 8]])
    federation = federation_of(finetune(rounds=6, fraction=0.5), tiny_problem(), tasks)
    federation.labelled[federation.shards[0][4]] = False
    ledger = federation.run(lambda _: None).ledger
    assert len(ledger.uploads) == 6 * 8
    present = {
        round_: [row.client for row in ledger.uploads if row.round == round_ and row.up_bytes] for round_ in range(6)
    }
    assert all(len(clients) == 2 and set(clients) <= {0, 2, 5, 7} for clients in present.values())
    assert len({tuple(clients) for clients in present.values()}) > 1
    for row in ledger.uploads:
        assert row.samples == len(tasks[0][row.client][1])
        assert row.labelled == (0 if row.client == 4 else row.samples)
        assert (row.down_bytes > 0) == (row.up_bytes > 0) == (row.client_seconds > 0)


@pytest.mark.parametrize("method", [finetune(), JointTraining(training=Training(**FAST))], ids=["finetune", "joint"])
def test_empty_clients_and_a_client_with_a_single_sample_run(method):
    server = learn_images(method, tiny_problem(), made_tasks([[20, 0, 1], [0, 1, 1], [1, 5, 30]]))
    assert server.sizes == [2, 2, 2]
    assert all(bool(torch.isfinite(value).all()) for value in server.network.state().values())


@pytest.mark.parametrize("name", ["finetune", "joint_training"])
@pytest.mark.parametrize("empty", [0, 1])
def test_a_task_that_nobody_has_a_label_of_is_passed_by(name, empty):
    """As the analytic methods do; label_rate can leave a class without any."""
    method = {"finetune": finetune(), "joint_training": JointTraining(training=Training(**FAST))}[name]
    tasks = made_tasks([[9, 8], [9, 8]])
    federation = federation_of(method, tiny_problem(), tasks)
    federation.labelled[np.concatenate(federation.shards[empty])] = False
    state = federation.run(lambda done: done.save())
    assert state.tasks_done == 2


# What freezes ---------------------------------------------------------------------------------------------------------


def after_each_task(method: FineTune, problem: Problem, tasks: ImageTasks) -> list[dict[str, torch.Tensor]]:
    states: list[dict[str, torch.Tensor]] = []
    learn_images(method, problem, tasks, after=lambda _, server: states.append(state_of(server)))
    return states


def groups(names) -> set[str]:
    """heads.0, body.stage1, ..."""
    return {".".join(name.split(".")[:2]) for name in names}


@pytest.mark.parametrize(
    ("knobs", "frozen"),
    [
        ({}, [set(), set()]),
        ({"frozen_heads": True}, [{"heads.0"}, {"heads.0", "heads.1"}]),
        ({"frozen_stages": 2}, [{"body.stage1", "body.stage2"}] * 2),
        (
            {"frozen_stages": 4, "frozen_heads": True, "loss_over": "task"},
            [
                {f"body.stage{s}" for s in (1, 2, 3, 4)} | {"heads.0"},
                {f"body.stage{s}" for s in (1, 2, 3, 4)} | {"heads.0", "heads.1"},
            ],
        ),
    ],
    ids=["nothing", "heads", "two stages", "all stages and heads"],
)
def test_what_is_frozen_stays_bit_for_bit_and_all_else_moves(knobs, frozen):
    method = finetune(momentum=0.9, weight_decay=0.01, **knobs)
    first, second, third = after_each_task(method, tiny_problem(), made_tasks([[20, 12], [11, 18], [9, 9]]))
    start = method.server(tiny_problem()).network.state()
    assert differing(start, first) == set(start)  # the first task trains everything
    for before, after, stay in ((first, second, frozen[0]), (second, third, frozen[1])):
        assert differing(before, after) == {name for name in before if groups([name]) - stay}


def test_a_resnets_first_stage_freezes_with_its_stem():
    first, second = after_each_task(
        finetune(frozen_stages=1), resnet_problem(), made_tasks([[12, 9], [10, 10]], size=16)
    )
    stay = {"body.conv1", "body.bn1", "body.layer1"}
    assert groups(first) >= stay
    assert differing(first, second) == {name for name in first if groups([name]) - stay}


def test_too_many_frozen_stages_are_refused_before_any_work():
    with pytest.raises(UserError, match=r"method\.frozen_stages=5 is more than the network has \(at most 4"):
        finetune(frozen_stages=5).check(tiny_problem(), [2])
    finetune(frozen_stages=4).check(tiny_problem(), [2])


@pytest.mark.parametrize(("name", "value"), [("frozen_stages", -1), ("loss_over", "new")])
def test_the_methods_own_knobs_are_checked_with_their_key(name, value):
    with pytest.raises(UserError, match=rf"^method\.{name}={value} "):
        finetune(**{name: value})


# The loss -------------------------------------------------------------------------------------------------------------


def test_a_loss_over_the_task_leaves_old_heads_without_a_gradient_and_one_over_all_seen_does_not():
    moved = {}
    for loss_over in ("task", "seen"):
        method = finetune(loss_over=loss_over, weight_decay=0.0)
        first, second = after_each_task(method, tiny_problem(), made_tasks([[20, 12], [11, 18]]))
        moved[loss_over] = groups(differing(first, second))
    assert moved["seen"] - moved["task"] == {"heads.0"}


@pytest.mark.parametrize("loss_over", ["task", "seen"])
def test_one_step_is_the_gradient_of_the_loss_said(loss_over):
    """One batch of all samples of task 1, where both losses differ: old - lr * gradient."""
    problem, tasks = tiny_problem(), made_tasks([[20], [16]])
    method = finetune(loss_over=loss_over, batch_size=64, weight_decay=0.0, rounds=1, lr=0.5)
    server, client = method.server(problem), method.client(problem)
    for task, clients in zip(images_stream(tasks), tasks, strict=True):
        server.start_task(task)
        broadcast = server.broadcast(task, 0)
        message = client.update(image_shard(0, task.index, *clients[0]), broadcast)
        if task.index == 0:
            server.absorb(0, message)
            server.finish_round()
    images, labels = tasks[1][0]
    model = Plain(problem)
    model.dimension = problem.network.dimension
    model.add_head(2)
    model.add_head(2)
    model.load_state_dict({name: value for name, value in broadcast.items() if "." in name}, strict=False)
    scores = model.train()((images / 255 - 0.5) / 0.5).double()
    competing = scores[:, 2:] if loss_over == "task" else scores
    right = scores[torch.arange(len(labels)), labels]
    (competing.exp().sum(dim=1).log() - right).mean().backward()
    for name, weight in model.named_parameters():
        step = torch.zeros_like(weight) if weight.grad is None else 0.5 * weight.grad
        torch.testing.assert_close(message[name], weight.detach() - step, rtol=1e-4, atol=1e-5, msg=name)


# What travels, and what it costs --------------------------------------------------------------------------------------


def tiny_sizes(problem: Problem) -> tuple[list[int], int]:
    """Numbers in each stage of the network (3x3 kernels, four per channel of a batch norm), and in a head of 2."""
    widths = [3, *(getattr(problem.network.build(), stage)[0].out_channels for stage in problem.network.stages)]
    return [9 * a * b + 4 * b for a, b in pairwise(widths)], 2 * problem.inputs + 2


#: Samples; client 3 joins in the second task, client 2 in the third.
LATE = [[12, 9, 0, 0], [9, 9, 0, 11], [8, 0, 9, 8]]


@pytest.mark.parametrize("wire", ["float32", "float64"])
def test_bytes_up_and_down_are_a_hand_count_and_what_is_frozen_goes_down_once(wire):
    problem = tiny_problem(wire=wire)
    stages, head = tiny_sizes(problem)
    method = finetune(frozen_stages=2, frozen_heads=True)
    ledger = federation_of(method, problem, made_tasks(LATE)).run(lambda _: None).ledger
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
    problem = tiny_problem()
    stages, head = tiny_sizes(problem)
    tasks = made_tasks([[9] * 4, [9] * 4])
    method = finetune(frozen_stages=1, frozen_heads=True, rounds=6, fraction=0.5)
    ledger = federation_of(method, problem, tasks).run(lambda _: None).ledger
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
    federation = federation_of(finetune(), tiny_problem(), made_tasks([[9, 9], [9, 9]]))
    ledger = federation.run(lambda _: None).ledger
    assert not any(ledger.kept.values())
    stages, head = tiny_sizes(federation.problem)
    sizes = {(row.task, row.down_bytes) for row in ledger.uploads}
    assert sizes == {(t, (sum(stages) + head * (t + 1)) * 4 + 16 + 4 * (t + 1)) for t in (0, 1)}


def test_the_ledger_remembers_through_json_what_clients_keep():
    federation = federation_of(finetune(frozen_stages=2, frozen_heads=True), tiny_problem(), made_tasks(LATE))
    ledger = federation.run(lambda _: None).ledger
    assert set(ledger.kept[3]) >= {"heads.0.weight", "heads.1.bias", "body.stage2.1.running_var"}
    restored = Ledger(clients=4)
    restored.restore(json.loads(json.dumps(ledger.state())))
    assert restored == ledger
    broadcast = Message(
        {"heads.0.weight": torch.zeros(7), "new": torch.zeros(3), "round": torch.tensor(0)},
        kept=["heads.0.weight", "new"],
    )
    assert [restored.send(3, broadcast) for _ in range(2)] == [12 + 8, 8]
    assert [Ledger(4).send(3, broadcast), restored.send(3, Message({"round": torch.tensor(0)}))] == [28 + 12 + 8, 8]


def adapters_problem() -> Problem:
    split = image_split([0, 1], ArrayImages(np.zeros((2, 16, 16, 3), dtype=np.uint8)))
    backbone = Timm("test_vit", pretrained=False, adapters=Adapters(3), transform=Transform())
    network = backbone.trainable(Dataset("made", split, split), seed=0)
    return dataclasses.replace(tiny_problem(), network=network, inputs=network.dimension)


def test_of_a_network_with_adapters_only_adapters_and_heads_travel_and_are_counted():
    problem = adapters_problem()
    federation = federation_of(finetune(rounds=1), problem, made_tasks([[4, 3]], size=16))
    start = cloned(federation.server.network.state_dict())
    ledger = federation.run(lambda _: None).ledger
    blocks, d, r = len(problem.network.build().blocks), problem.inputs, 3
    adapters = blocks * (2 * d * r + d + r)
    head = 2 * d + 2
    assert [row.up_bytes for row in ledger.uploads] == [(adapters + head) * 4 + 8] * 2
    assert [row.down_bytes for row in ledger.uploads] == [(adapters + head) * 4 + 16 + 4] * 2
    after = federation.server.network.state_dict()
    assert all(".mlp.down." in name or ".mlp.up." in name for name in differing(start, after))
    assert differing(start, after)
    assert set(federation.server.state_dict()) < set(after) | {"classes"}


def test_a_half_precision_wire_rounds_the_models_and_still_learns():
    problem = tiny_problem(wire="bfloat16")
    tasks = made_tasks([[20, 12]])
    server = learn_images(finetune(rounds=6), problem, tasks)
    images, labels = (torch.cat([parts[i] for parts in tasks[0]]) for i in (0, 1))
    assert (server.predict(images).argmax(dim=1) == labels).float().mean() > 0.9


def test_three_clients_together_learn_the_newest_task():
    tasks = made_tasks([[20, 12, 9]] * 2)
    server = learn_images(finetune(rounds=6, epochs=2), tiny_problem(), tasks)
    images, labels = (torch.cat([parts[i] for parts in tasks[1]]) for i in (0, 1))
    prediction = server.classify(images)
    assert prediction.tasks is None
    assert prediction.scores.shape == (len(labels), 4)
    assert (prediction.scores.argmax(dim=1) == labels).float().mean() > 0.95


def test_the_model_on_file_predicts_as_the_server_does():
    problem, tasks = tiny_problem(), made_tasks([[20, 12], [14, 9]])
    server = learn_images(finetune(), problem, tasks)
    model = server.model()
    body = problem.network.build()
    body.load_state_dict(
        {name.removeprefix("body."): value for name, value in model.items() if name.startswith("body.")}
    )
    images = tasks[0][0][0]
    with torch.no_grad():
        scores = body.eval()((images / 255 - 0.5) / 0.5) @ model["W"] + model["bias"]
    torch.testing.assert_close(server.predict(images), scores, rtol=1e-4, atol=1e-5)


def test_a_server_goes_on_from_its_state_bit_for_bit():
    problem, tasks = tiny_problem(), made_tasks([[20, 12], [14, 9], [9, 9]])
    method = finetune(frozen_stages=1, frozen_heads=True)
    whole = learn_images(method, problem, tasks)
    states: list = []
    learn_images(method, problem, tasks[:2], after=lambda _, server: states.append(cloned(server.state_dict())))
    for done, state in enumerate(states, start=1):
        federation = federation_of(method, problem, tasks)
        federation.server.load_state_dict({name: value.contiguous() for name, value in state.items()})
        federation.state.tasks_done = done
        federation.run(lambda _: None)
        assert not differing(whole.model(), federation.server.model())


# Joint training -------------------------------------------------------------------------------------------------------


def joint(restart: bool = True, **knobs) -> JointTraining:
    return JointTraining(
        training=Training(**{**FAST, "momentum": 0.9, "augment": "crop_flip", **knobs}), restart=restart
    )


def test_joint_training_is_plain_sgd_over_all_samples_so_far_bit_for_bit():
    """In the order in which they came; from the initial network at every task."""
    problem, tasks = tiny_problem(), made_tasks([[20, 7], [0, 25], [9, 9]])
    method = joint(rounds=2, epochs=2, schedule="cosine")
    states = []
    learn_images(method, problem, tasks, after=lambda _, server: states.append(state_of(server)))
    merged = [tuple(torch.cat([parts[i] for parts in clients]) for i in (0, 1)) for clients in tasks]
    for done, state in enumerate(states, start=1):
        plain = plainly(problem, method.training, merged[:done], joint=True).state_dict()
        for name, value in state.items():
            assert torch.equal(value, plain[name]), (done, name)


def test_joint_training_does_not_care_who_held_a_sample():
    """The same samples in the same order, dealt to one client, to two, to four."""
    images, labels = made_tasks([[40]])[0][0]
    models = []
    for sizes in ([40], [13, 27], [1, 0, 30, 9]):
        shards = list(zip(images.split(sizes), labels.split(sizes), strict=True))
        models.append(learn_images(joint(), tiny_problem(), [shards]).model())
    assert not differing(models[0], models[1])
    assert not differing(models[0], models[2])


def test_a_restart_forgets_what_earlier_tasks_trained_and_without_one_it_counts():
    problem, tasks = tiny_problem(), made_tasks([[20, 7], [9, 16]])

    def spoil(_, server):
        server.network.load({name: torch.full_like(value, 0.01) for name, value in server.network.state().items()})

    for restart in (True, False):
        method, models = joint(restart), []
        for spoilt in (False, True):
            federation = federation_of(method, problem, tasks)
            server = federation.server
            federation.run(
                lambda done, server=server, spoilt=spoilt: (
                    spoil(None, server) if spoilt and done.state.tasks_done == 1 else None
                )
            )
            models.append(server.model())
        assert bool(differing(*models)) is not restart


@pytest.mark.parametrize("restart", [True, False])
def test_joint_training_goes_on_from_its_state_bit_for_bit(restart):
    problem, tasks = tiny_problem(), made_tasks([[20, 12], [14, 9], [9, 9]])
    whole, saved = federation_of(joint(restart), problem, tasks), []
    whole.run(lambda done: saved.append((json.dumps(done.save()[0]), cloned(done.save()[1]))))
    for state, tensors in saved:
        again = federation_of(joint(restart), problem, tasks)
        again.restore(json.loads(state), tensors)
        again.run(lambda _: None)
        assert not differing(whole.server.model(), again.server.model())
        np.testing.assert_array_equal(whole.state.answers["correct"], again.state.answers["correct"])


def test_joint_training_uploads_bytes_and_labels_and_gets_nothing():
    ledger = federation_of(joint(), tiny_problem(size=9), made_tasks(LATE, size=9)).run(lambda _: None).ledger
    assert len(ledger.uploads) == 3 * 4
    for row in ledger.uploads:
        count = LATE[row.task][row.client]
        assert (row.up_bytes, row.down_bytes, row.stage) == (count * (3 * 9 * 9 + 4), 0, "samples")
