"""TARGET: a client's step against the equations, limits, messages by formula, variants, and resumed runs."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.data_free.target import TARGET, Rehearsed, Synthesis
from fcl_bench.training.network import Heads
from fcl_bench.training.objective import Objective
from fcl_bench.typed import typed_instance
from tests.methods.classical_harness import STREAMS, exchanged, federation, pictures, training
from tests.methods.harness import turn
from tests.methods.training_harness import (
    image_shard,
    image_tasks,
    images_stream,
    learn_image_task,
    learn_images,
    tiny_context,
)
from tests.methods.whole_runs import learnt, model_of, same

POOL, NOISE = 20, 6


def synthesis(**own) -> Synthesis:
    small = {"images": POOL, "batch": 10, "warmup": 1, "noise": NOISE, "g_steps": 2, "kd_steps": 2, "lr_student": 0.02}
    return Synthesis(**{**small, **own})


def target(knobs: dict | None = None, made: dict | None = None, **own) -> TARGET:
    return TARGET(training(**(knobs or {})), synthesis=synthesis(**(made or {})), **own)


def second_task(method: TARGET, client: int = 0):
    """Both halves in the first round of the second task, with a client's shard and the broadcast."""
    context, tasks = tiny_context(), pictures()
    server, half = learn_images(method, context, tasks[:1]), method.client(context)
    task = images_stream(tasks)[1]
    server.start_task(task)
    broadcast, client_data = server.broadcast(task, 0), image_shard(client, 1, *tasks[1][client])
    return server, half, client_data, broadcast


# A client's loss ------------------------------------------------------------------------------------------------------


def test_the_hand_value():
    """Of the synthetic images: q = (1, 0), q' = (0, 2), T = 2: 25 times 0.839606. Their third logit plays no part."""
    heads = Heads(((0, 1), (2,)), (2,))
    scores = {"own": torch.tensor([[3.0, 1.0, 0.2]]), "made": torch.tensor([[1.0, 0.0, 9.0]])}
    objective = Rehearsed(heads, TARGET(), lambda _: torch.tensor([[0.0, 2.0]]), SimpleNamespace(next=lambda _: "made"))
    # The cross-entropy over the one class of the task is 0.
    loss = objective.loss(lambda inputs: scores[inputs], "own", torch.tensor([2]))
    assert float(loss) == pytest.approx(25 * 0.839606, abs=2e-5)


def test_a_clients_round_is_that_of_the_equations(monkeypatch):
    """Two steps of SGD by hand, cross-entropy over the task's classes and distillation of the recorded images."""
    method = target({"batch_size": 4, "rounds": 1, "momentum": 0.0, "weight_decay": 0.0}, kd=3.0)
    _, half, client_data, broadcast = second_task(method, client=2)  # 8 samples of columns 3 and 4
    own, made = [], []
    loss_of = Rehearsed.loss

    def recording(self, network, inputs, labels):
        own.append((inputs.clone(), labels.clone()))
        drawn = self._pool.next
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._pool, "next", lambda count: (made.append(drawn(count)), made[-1])[1])
            return loss_of(self, network, inputs, labels)

    monkeypatch.setattr(Rehearsed, "loss", recording)
    upload = turn(half, client_data, broadcast)
    assert len(own) == len(made) == 2
    teacher = half.teacher(client_data, broadcast)
    half.take_over(client_data, broadcast)
    plain = copy.deepcopy(half.network).train()
    for (inputs, labels), images in zip(own, made, strict=True):
        assert images.shape == (4, 3, 8, 8)
        q = plain(inputs)[:, 3:]
        loss = (q.logsumexp(dim=1) - q[torch.arange(4), labels - 3]).mean()
        p = (teacher(images) / 2).exp() / (teacher(images) / 2).exp().sum(dim=1, keepdim=True)
        said = plain(images)[:, :3] / 2
        loss = loss - 3.0 * (p * (said - said.logsumexp(dim=1, keepdim=True))).sum(dim=1).mean()
        weights = dict(plain.named_parameters())
        for value, gradient in zip(
            weights.values(), torch.autograd.grad(loss, list(weights.values()), allow_unused=True), strict=True
        ):
            if gradient is not None:
                value.data -= 0.05 * gradient
    for name, value in plain.state().items():
        torch.testing.assert_close(upload[name].float(), value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_a_clients_own_batches_are_those_of_fedavg(monkeypatch):
    """Bit for bit, with augmentation, through all epochs."""
    seen = []
    loss_of = Objective.loss
    monkeypatch.setattr(
        Objective,
        "loss",
        lambda self, network, x, y: (seen.append((x.clone(), y.clone())), loss_of(self, network, x, y))[1],
    )
    knobs = {"augment": "crop_flip", "epochs": 3, "batch_size": 4}
    _, half, client_data, broadcast = second_task(target(knobs))
    seen.clear()
    turn(half, client_data, broadcast)
    ours, plain = list(seen), FedAvg(training(**knobs), loss_classes="task")
    seen.clear()
    turn(plain.client(tiny_context()), client_data, broadcast)
    assert len(ours) == len(seen) == 9
    for (x, y), (theirs, labels) in zip(ours, seen, strict=True):
        assert torch.equal(x, theirs)
        assert torch.equal(y, labels)


@pytest.mark.slow
def test_clients_see_synthetic_images_in_orders_of_their_own():
    """The same client sees the same ones in a round, whoever's turn came before."""
    _, half, client_data, broadcast = second_task(target())
    half.take_over(client_data, broadcast)
    first, theirs, again = (
        half.synthetic(dataclasses.replace(client_data, client=client), broadcast)(12) for client in (0, 2, 0)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, theirs)


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("off", [{"kd": 0.0}, {"made": {"images": 0}}], ids=str)
@pytest.mark.parametrize("over", ["task", "seen"])
def test_without_distillation_or_images_it_is_fedavg_bit_for_bit_and_byte_for_byte(off, over):
    knobs = {"fraction": 0.5, "rounds": 3}
    ours = federation(target(knobs, loss_classes=over, **off))
    theirs = federation(FedAvg(training(**knobs), loss_classes=over))
    assert same(model_of(ours), model_of(theirs))
    assert exchanged(ours) == exchanged(theirs)
    assert ours.server.privacy()["synthetic_images"] == 0
    assert not same(model_of(federation(target(knobs, loss_classes=over))), model_of(theirs))


def test_the_first_task_is_fedavg_bit_for_bit():
    first = STREAMS["images"][1]()[:1]
    ours, theirs = federation(target(), first), federation(FedAvg(training(), loss_classes="task"), first)
    assert same(model_of(ours), model_of(theirs))
    assert exchanged(ours) == exchanged(theirs)


def test_synthesis_leaves_the_model_and_what_trains_as_they_are():
    context, tasks = tiny_context(), pictures()
    method = target()
    server, plain = (learn_images(m, context, tasks[:1]) for m in (method, FedAvg(training(), loss_classes="task")))
    task = images_stream(tasks)[1]
    server.start_task(task)
    plain.start_task(task)
    assert server.made["images"].float().std() > 1
    assert same(dict(server.network.state_dict()), dict(plain.network.state_dict()))
    for own, theirs in zip(server.network.parameters(), plain.network.parameters(), strict=True):
        assert own.requires_grad == theirs.requires_grad
        assert own.grad is None


@pytest.mark.slow
def test_the_stronger_the_distillation_the_closer_stay_predictions_of_synthetic_images():
    """Mean distance of the old classes' distribution from the teacher's, all classes competing on own samples."""
    tasks, found = pictures()[:2], []
    for kd in (0.01, 1.0, 25.0):
        method = target({"rounds": 6, "lr": 0.02}, {"g_steps": 5}, kd=kd, loss_classes="seen")
        context = tiny_context()
        server = learn_images(method, context, tasks[:1])
        first = copy.deepcopy(server)
        task = images_stream(tasks)[1]
        learn_image_task(method, context, server, task, tasks[1])
        images = server.made["images"]
        told = [one.logits(one.embed(images))[:, :3].softmax(dim=1) for one in (first, server)]
        found.append(float((told[1] - told[0]).abs().sum(dim=1).mean()))
    assert found[0] > found[1] > found[2]
    assert found[2] < 0.5 * found[0]


# Messages -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("float32", "float16")
@pytest.mark.parametrize("wire", ["float32", "float16"])
def test_what_goes_down_once_to_each_client_of_a_task_has_the_bytes_of_the_formula(wire):
    """|theta| in float32 and n images of 3 s^2 bytes, whatever the wire of uploads."""
    context, tasks = tiny_context(wire=wire), pictures()
    knobs = {"rounds": 3, "fraction": 0.6}
    ours = learnt(target(knobs), context, tasks)
    theirs = learnt(FedAvg(training(**knobs), loss_classes="task"), context, tasks)
    body = sum(value.numel() for name, value in model_of(theirs).items() if name.startswith("body."))
    dimension = context.network.dimension
    old, told = [0, 3, 5], set()
    for own, plain in zip(ours.state.ledger.uploads, theirs.state.ledger.uploads, strict=True):
        assert own.up_bytes == plain.up_bytes
        more = 0
        if own.down_bytes and own.task and (own.task, own.client) not in told:
            teacher = 4 * (body + old[own.task] * (dimension + 1))
            more = teacher + POOL * 3 * 8 * 8
            told.add((own.task, own.client))
        assert own.down_bytes - plain.down_bytes == more
    assert {task for task, _ in told} == {1, 2}
    assert ours.server.privacy()["synthetic_images"] == 2 * POOL


@pytest.mark.slow
def test_clients_keep_nothing_but_what_they_received():
    """The teacher and its images, through the task."""
    found = federation(target())
    assert found.transport.state_dict() == {}
    kept = {kind: size for kind, size in found.state.client_storage_bytes.items() if size}
    assert [*kept] == ["received"]
    assert kept["received"] > found.server.pictures()["synthetic"].images.nbytes


@pytest.mark.slow
def test_the_run_has_pictures_with_the_classes_that_the_teacher_sees():
    found = federation(target())
    shown = found.server.pictures()["synthetic"]
    assert shown.images.dtype == torch.uint8
    assert shown.images.shape == (32, 3, 8, 8)
    assert shown.tasks.tolist() == [0] * 16 + [1] * 16
    assert int(shown.labels[:16].max()) < 3
    assert int(shown.labels[16:].max()) < 5
    assert len(found.server.report()["synthesis_right"]) == 2
    assert all(0 <= share <= 1 for share in found.server.report()["synthesis_right"])


# The public code's variant --------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("paper-4")
@pytest.mark.parametrize(("variant", "steps"), [("paper", 4), ("published", 3)])
def test_a_pass_ends_with_the_synthetic_images_as_published(variant, steps, monkeypatch):
    """12 own samples in batches of 3; 20 synthetic ones in batches of 7."""
    method = target({"batch_size": 3, "epochs": 2}, variant=variant, synthetic_batch=7)
    _, half, client_data, broadcast = second_task(method)
    sizes = []
    loss_of = Rehearsed.loss
    monkeypatch.setattr(
        Rehearsed, "loss", lambda self, network, x, y: (sizes.append(len(x)), loss_of(self, network, x, y))[1]
    )
    turn(half, client_data, broadcast)
    assert sizes == [3] * (2 * steps)


def test_as_published_more_synthetic_images_than_samples_end_no_pass_early():
    method = target({"batch_size": 4}, variant="published", synthetic_batch=2)
    _, half, client_data, broadcast = second_task(method)
    half.take_over(client_data, broadcast)
    batches = half.samples(client_data, broadcast, {}).batches(4, lambda x, _: x, torch.Generator())
    assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == sorted(client_data.labels.tolist())


def test_the_variants_sizes():
    paper, published = TARGET(), TARGET(variant="published")
    assert (paper.images, paper.per_step) == (8000, 64)
    assert (published.images, published.per_step) == (2560, 500)
    assert TARGET(synthesis=Synthesis(images=640), synthetic_batch=30, variant="published").images == 640
    # 2,560 images are ten batches, so the student never learns: its part begins after 20.
    assert published.images / published.synthesis.batch < published.synthesis.warmup


# Streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_seed_makes_the_same_images_and_another_others():
    found = [learnt(target(), tiny_context(seed=seed), pictures()).server for seed in (0, 0, 1)]
    assert torch.equal(found[0].made["images"], found[1].made["images"])
    assert not torch.equal(found[0].made["images"], found[2].made["images"])


@pytest.mark.slow
def test_recurring_classes_and_a_task_without_a_new_one():
    """Class 1 comes back in task 1; task 2 has no class of its own."""
    rng = np.random.default_rng(0)
    [[(images, _)]] = image_tasks(rng, [3], [[36]])
    parts, labels = images.split(12), (torch.arange(12) % 2, 1 + torch.arange(12) % 2, torch.arange(12) % 3)
    tasks = [[(part, own)] for part, own in zip(parts, labels, strict=True)]
    found = learnt(target(), tiny_context(), tasks)
    assert found.server.tasks == [(0, 1), (1, 2), (0, 1, 2)]
    assert all(bool(torch.isfinite(value).all()) for value in model_of(found).values())
    assert len(found.server.right) == 2


def test_a_client_with_a_single_sample_trains_beside_synthetic_ones():
    rng = np.random.default_rng(0)
    tasks = image_tasks(rng, [2, 2], [[8, 6], [1, 9]])
    found = learnt(target({"epochs": 2}), tiny_context(), tasks)
    assert all(bool(torch.isfinite(value).all()) for value in model_of(found).values())


# Wrong input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "knobs",
    [
        {"kd": -1},
        {"temperature": 0},
        {"synthetic_batch": 1},
        {"variant": "code"},
        {"loss_classes": "old"},
    ],
    ids=str,
)
def test_wrong_knobs_name_the_key(knobs):
    with pytest.raises(UserError, match=rf"method\.{next(iter(knobs))}"):
        typed_instance(TARGET, knobs, "method")


def test_what_contradicts_is_refused():
    with pytest.raises(UserError, match=r"method.trains=features: method=target makes images \(method.trains=images\)"):
        TARGET(trains="features")


def test_a_student_that_diverges_ends_the_run_in_one_line():
    with pytest.raises(UserError, match=r"method.synthesis.lr_student=1e\+09: the student diverged"):
        federation(target(made={"lr_student": 1e9, "kd_steps": 30}))
