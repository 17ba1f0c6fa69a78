"""Methods that train: FedAvg against plain loops, what freezes, who takes part, what the loss is over."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from fcl_bench.engine.codec import decoded, encoded
from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.centralised import Centralised
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.transformers.l2p import L2P
from fcl_bench.protocol.context import Context, Task
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import Training
from fcl_bench.typed import typed_instance
from tests.methods.harness import turn
from tests.methods.plain_training import (
    FAST,
    STAGE,
    Plain,
    cloned,
    differing,
    fedavg,
    made_tasks,
    plainly,
    resnet_context,
    state_of,
)
from tests.methods.training_harness import (
    CPU,
    ImageTasks,
    federation_of,
    image_shard,
    images_stream,
    learn_images,
    tiny_context,
)


@pytest.mark.slow_cases("resnet-dtype2")
@pytest.mark.parametrize(
    ("network", "dtype"), [("tiny", torch.float32), ("tiny", torch.float64), ("resnet", torch.float64)]
)
def test_fedavg_of_one_client_is_plain_sgd_bit_for_bit(network, dtype):
    """Over rounds and tasks, with everything on: momentum (anew in every round), decay, schedule, augmentation."""
    context = dataclasses.replace({"tiny": tiny_context, "resnet": resnet_context}[network](), dtype=dtype)
    tasks = made_tasks([[30], [21]], size=context.network.size)
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
    server = learn_images(FedAvg(training=knobs, loss_classes="seen"), context, tasks)
    plain = plainly(context, knobs, [clients[0] for clients in tasks]).state_dict()
    for name, value in server.network.state().items():
        assert torch.equal(value, plain[name]), name
    assert len(server.network.state()) == sum("num_batches" not in name for name in plain)


# The average ----------------------------------------------------------------------------------------------------------


def uploads_of(method: FedAvg, context: Context, clients: list) -> tuple:
    """The server in its first round, and each client's upload on the wire."""
    server, client = method.server(context), method.client(context)
    task = images_stream([clients])[0]
    server.start_task(task)
    broadcast = server.broadcast(task, 0)
    turns = (turn(client, image_shard(k, 0, *client_data), broadcast) for k, client_data in enumerate(clients))
    messages = [encoded(upload.with_tensors(cloned(upload)), context.wire) for upload in turns]
    return server, messages


def averaged(server, messages: list[Message], context: Context, order: list[int] | None = None) -> dict:
    server.broadcast(Task(0, range(2), 2), 0)
    for k in order or range(len(messages)):
        server.absorb(k, decoded(messages[k], context.dtype, CPU))
    server.finish_round()
    return state_of(server)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("counts", [[1, 1, 1], [7, 13, 1], [1, 3, 5000]])
def test_equal_models_average_to_themselves_bit_for_bit(weighting, dtype, counts):
    context = tiny_context(dtype=dtype)
    server, [message] = uploads_of(fedavg(weighting=weighting), context, made_tasks([[20]])[0])
    same = [dataclasses.replace(message, samples=count) for count in counts]
    found = averaged(server, same, context)
    assert set(found) == set(message)
    assert all(torch.equal(value, message[name]) for name, value in found.items())


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_average_is_the_weighted_mean_running_statistics_included(weighting, dtype):
    context, counts = tiny_context(dtype=dtype), [9, 40, 1, 17]
    server, messages = uploads_of(fedavg(weighting=weighting), context, made_tasks([counts])[0])
    assert [message.samples for message in messages] == counts
    found = averaged(server, messages, context)
    shares = np.array(counts if weighting == "samples" else [1] * 4, dtype=np.float64)
    for name, value in found.items():
        models = np.stack([message[name].double().numpy() for message in messages])
        expected = np.tensordot(shares / shares.sum(), models, axes=1)
        np.testing.assert_allclose(value.double().numpy(), expected, rtol=1e-7, atol=1e-12, err_msg=name)
    assert {f"body.stage4.{name}" for name in STAGE} <= set(found)
    spread = messages[0]["body.stage1.1.running_var"] - messages[1]["body.stage1.1.running_var"]
    assert bool(spread.any())


def test_a_round_without_an_upload_leaves_the_model():
    context = tiny_context()
    server, _ = uploads_of(fedavg(), context, made_tasks([[5]])[0])
    before = state_of(server)
    assert not differing(before, averaged(server, [], context))


def test_every_round_starts_from_the_average_of_the_one_before():
    context, tasks, sent, sums = tiny_context(), made_tasks([[8, 24]]), [], {}

    def seen(k, broadcast, message):
        round_ = int(broadcast["round"])
        sent.append((round_, broadcast["body.stage1.0.weight"].double()))
        share = len(tasks[0][k][1]) / 32
        sums[round_] = sums.get(round_, 0) + share * message["body.stage1.0.weight"].double()

    learn_images(fedavg(rounds=3), context, tasks, seen=seen)
    assert [round_ for round_, _ in sent] == [0, 0, 1, 1, 2, 2]
    for round_, model in sent:
        if round_:
            torch.testing.assert_close(model, sums[round_ - 1], rtol=1e-7, atol=1e-12)


def test_the_clients_half_keeps_nothing():
    """Whatever a client half did before, its answer to a shard and a broadcast is the same."""
    context, tasks = tiny_context(), made_tasks([[20, 14]])
    method = fedavg()
    server, [first, second] = uploads_of(method, context, tasks[0])
    broadcast = server.broadcast(images_stream(tasks)[0], 0)
    again = turn(method.client(context), image_shard(1, 0, *tasks[0][1]), broadcast)
    assert all(torch.equal(value, second[name]) for name, value in again.items())
    assert not torch.equal(first["heads.0.weight"], second["heads.0.weight"])


def test_step_sizes_are_told_by_the_server():
    told = {}
    learn_images(
        fedavg(rounds=4, lr=0.2, schedule="step", milestones=[1, 3], decay=0.5),
        tiny_context(),
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
    method = fedavg(fraction=fraction, rounds=5)
    server = method.server(tiny_context())
    available = [3 * k for k in range(clients)]
    for round_ in range(5):
        present = server.participants(Task(0, range(2), 2), round_, available)
        assert len(present) == len(set(present)) == expected
        assert set(present) <= set(available)
        assert present == sorted(present)


def drawn(seed: int, task: int = 0) -> list[list[int]]:
    server = fedavg(fraction=0.3, rounds=40).server(tiny_context(seed=seed))
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
    federation = federation_of(fedavg(rounds=6, fraction=0.5), tiny_context(), tasks, unlabelled=[(0, 4)])
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


@pytest.mark.parametrize("method", [fedavg(), Centralised(training=Training(**FAST))], ids=["fedavg", "joint"])
def test_empty_clients_and_a_client_with_a_single_sample_run(method):
    server = learn_images(method, tiny_context(), made_tasks([[20, 0, 1], [0, 1, 1], [1, 5, 30]]))
    assert server.columns == server.tasks == [(0, 1), (2, 3), (4, 5)]
    assert all(bool(torch.isfinite(value).all()) for value in server.network.state().values())


@pytest.mark.parametrize("name", ["fedavg", "centralised"])
@pytest.mark.parametrize("empty", [0, 1])
def test_a_task_that_nobody_has_a_label_of_is_passed_by(name, empty):
    """As the analytic methods do; label_rate can leave a class without any."""
    method = {"fedavg": fedavg(), "centralised": Centralised(training=Training(**FAST))}[name]
    tasks = made_tasks([[9, 8], [9, 8]])
    federation = federation_of(method, tiny_context(), tasks, unlabelled=[(empty, 0), (empty, 1)])
    state = federation.run(lambda done: done.save())
    assert state.tasks_done == 2


# What freezes ---------------------------------------------------------------------------------------------------------


def after_each_task(method: FedAvg, context: Context, tasks: ImageTasks) -> list[dict[str, torch.Tensor]]:
    states: list[dict[str, torch.Tensor]] = []
    learn_images(method, context, tasks, after=lambda _, server: states.append(state_of(server)))
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
            {"frozen_stages": 4, "frozen_heads": True, "loss_classes": "task"},
            [
                {f"body.stage{s}" for s in (1, 2, 3, 4)} | {"heads.0"},
                {f"body.stage{s}" for s in (1, 2, 3, 4)} | {"heads.0", "heads.1"},
            ],
        ),
    ],
    ids=["nothing", "heads", "two stages", "all stages and heads"],
)
def test_what_is_frozen_stays_bit_for_bit_and_all_else_moves(knobs, frozen):
    method = fedavg(momentum=0.9, weight_decay=0.01, **knobs)
    first, second, third = after_each_task(method, tiny_context(), made_tasks([[20, 12], [11, 18], [9, 9]]))
    start = method.server(tiny_context()).network.state()
    assert differing(start, first) == set(start)  # the first task trains everything
    for before, after, stay in ((first, second, frozen[0]), (second, third, frozen[1])):
        assert differing(before, after) == {name for name in before if groups([name]) - stay}


def test_a_resnets_first_stage_freezes_with_its_stem():
    first, second = after_each_task(fedavg(frozen_stages=1), resnet_context(), made_tasks([[12, 9], [10, 10]], size=16))
    stay = {"body.conv1", "body.bn1", "body.layer1"}
    assert groups(first) >= stay
    assert differing(first, second) == {name for name in first if groups([name]) - stay}


def test_too_many_frozen_stages_are_refused_before_any_work():
    with pytest.raises(UserError, match=r"method\.frozen_stages=5 is more than the network has \(at most 4"):
        fedavg(frozen_stages=5).check(tiny_context(), [2])
    fedavg(frozen_stages=4).check(tiny_context(), [2])


@pytest.mark.parametrize(("name", "value"), [("frozen_stages", -1), ("loss_classes", "new")])
def test_the_methods_own_knobs_are_checked_with_their_key(name, value):
    with pytest.raises(UserError, match=rf"^method\.{name}={value} "):
        typed_instance(FedAvg, {name: value}, "method")


# The loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("L2P-prompts.K-did you mean body\\\\.prompts\\\\? choices: body\\\\.prompts, heads\\\\)")
@pytest.mark.parametrize(
    ("method", "prefix", "told"),
    [
        (FedAvg, "head.0", r"choices: body\.stage1, .*heads"),
        (FedAvg, "heads.2", "heads"),
        (FedAvg, "stage1", r"did you mean body\.stage1 or "),
        (L2P, "prompts.K", r"did you mean body\.prompts\? choices: body\.prompts, heads\)"),
        (L2P, "body.vit", "heads"),
    ],
)
def test_a_rate_of_no_parameter_that_trains_is_refused_before_any_work(method, prefix, told):
    """A slip of the hand in the name would leave the usual rate in force."""
    context = tiny_context(architecture="vit" if method is L2P else "conv")
    with pytest.raises(UserError, match=rf"^method\.training\.rates\.{prefix}=0\.5: .*{told}"):
        method(training=Training(rates={"heads.1": 0.1, prefix: 0.5})).check(context, [2, 3])


def test_rates_of_names_that_come_with_later_tasks_are_possible():
    method = L2P(training=Training(rates={"heads": 0.1, "heads.1.bias": 0.2, "body.prompts.K": 0.5, "bo": 0.3}))
    method.check(tiny_context(architecture="vit"), [2, 3])


def test_a_loss_classes_the_task_leaves_old_heads_without_a_gradient_and_one_over_all_seen_does_not():
    moved = {}
    for loss_classes in ("task", "seen"):
        method = fedavg(loss_classes=loss_classes, weight_decay=0.0)
        first, second = after_each_task(method, tiny_context(), made_tasks([[20, 12], [11, 18]]))
        moved[loss_classes] = groups(differing(first, second))
    assert moved["seen"] - moved["task"] == {"heads.0"}


@pytest.mark.parametrize("loss_classes", ["task", "seen"])
def test_one_step_is_the_gradient_of_the_loss_said(loss_classes):
    """One batch of all samples of task 1, where both losses differ: old - lr * gradient."""
    context, tasks = tiny_context(), made_tasks([[20], [16]])
    method = fedavg(loss_classes=loss_classes, batch_size=64, weight_decay=0.0, rounds=1, lr=0.5)
    server, client = method.server(context), method.client(context)
    for task, clients in zip(images_stream(tasks), tasks, strict=True):
        server.start_task(task)
        broadcast = server.broadcast(task, 0)
        message = turn(client, image_shard(0, task.index, *clients[0]), broadcast)
        if task.index == 0:
            server.absorb(0, message)
            server.finish_round()
    images, labels = tasks[1][0]
    model = Plain(context)
    model.dimension = context.network.dimension
    model.add_head(2)
    model.add_head(2)
    model.load_state_dict({name: value for name, value in broadcast.items() if "." in name}, strict=False)
    scores = model.train()((images / 255 - 0.5) / 0.5).double()
    competing = scores[:, 2:] if loss_classes == "task" else scores
    right = scores[torch.arange(len(labels)), labels]
    (competing.exp().sum(dim=1).log() - right).mean().backward()
    for name, weight in model.named_parameters():
        step = torch.zeros_like(weight) if weight.grad is None else 0.5 * weight.grad
        torch.testing.assert_close(message[name], weight.detach() - step, rtol=1e-4, atol=1e-5, msg=name)
