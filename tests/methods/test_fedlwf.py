"""FedLwF against the equations in NumPy, its gradient, its teacher, and its limits."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.distillation.fedlwf import FedLwF
from fcl_bench.training.network import Heads
from fcl_bench.training.objective import Distilled
from fcl_bench.typed import typed_instance
from tests.methods.classical_harness import (
    INPUTS,
    SIZES,
    STREAMS,
    assert_as_written_down,
    exchanged,
    feature_tasks,
    federation,
    pictures,
    training,
)
from tests.methods.classical_oracle import Classical, softmax
from tests.methods.harness import turn
from tests.methods.training_harness import image_shard, images_stream, learn_images, tiny_context
from tests.methods.whole_runs import feature_context, model_of, same

WHOLE = {"batch_size": 64, "epochs": 3, "lr": 0.1}


@pytest.mark.parametrize("recurring", [False, True])
@pytest.mark.parametrize(
    "knobs", [{}, {"strength": 1.0, "temperature": 0.5}, {"loss_classes": "seen", "temperature": 5.0}], ids=str
)
def test_training_on_features_is_what_the_equations_say(knobs, recurring):
    method = FedLwF(training(**WHOLE), trains="features", **knobs)
    oracle = Classical(momentum=0.5, decay=1e-3, over=method.loss_classes, lwf=method.strength, T=method.temperature)
    assert_as_written_down(method, oracle, recurring)


# The loss and its gradient --------------------------------------------------------------------------------------------


def distilled(teacher: torch.Tensor, strength: float, temperature: float) -> Distilled:
    """With a teacher whose logits are given: two classes, and one more in the task."""
    old = teacher.shape[1]
    heads = Heads((tuple(range(old)), (old,)), (old,))
    return Distilled(heads, "task", False, lambda _: teacher, strength, temperature)


def test_the_hand_value():
    """q = (1, 0), q_old = (0, 2), T = 2; the cross-entropy over the one class of the task is 0."""
    loss = distilled(torch.tensor([[0.0, 2.0]]), 1.0, 2.0).score_loss(
        torch.tensor([[1.0, 0.0, 0.3]]), torch.tensor([2]), torch.zeros(1)
    )
    assert float(loss) == pytest.approx(0.839606, abs=5e-7)
    by_hand = -(softmax(np.array([[0.0, 1.0]])) * np.log(softmax(np.array([[0.5, 0.0]])))).sum()
    assert by_hand == pytest.approx(0.839606, abs=5e-7)


@pytest.mark.parametrize(("strength", "T"), [(3.0, 2.0), (0.5, 1.0), (7.0, 10.0)])
def test_the_gradient_of_the_old_logits(strength, T):
    """(lambda / T) (softmax(q_O / T) - softmax(q_old / T)) / b, without T^2; it also is a finite difference."""
    rng = np.random.default_rng(0)
    q, q_old = rng.standard_normal((6, 4)), rng.standard_normal((6, 3))
    objective = distilled(torch.from_numpy(q_old), strength, T)
    scores = torch.from_numpy(q).requires_grad_()
    labels, inputs = torch.full((6,), 3), torch.zeros(6)
    objective.score_loss(scores, labels, inputs).backward()
    expected = strength / T * (softmax(q[:, :3] / T) - softmax(q_old / T)) / 6
    np.testing.assert_allclose(scores.grad[:, :3].numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(scores.grad[:, 3].numpy(), 0, atol=1e-12)
    for row, column in ((0, 0), (3, 2), (5, 3)):
        step = torch.zeros_like(scores)
        step[row, column] = 1e-5
        up, down = (float(objective.score_loss(scores.detach() + s, labels, inputs)) for s in (step, -step))
        assert (up - down) / 2e-5 == pytest.approx(float(scores.grad[row, column]), abs=1e-8)


# The teacher ----------------------------------------------------------------------------------------------------------


def second_task(method: FedLwF, context=None):
    """A client's half in the first round of the second task, with its shard, the broadcast and its objective."""
    context, tasks = context or tiny_context(), pictures()
    server, client = learn_images(method, context, tasks[:1]), method.client(context)
    task = images_stream(tasks)[1]
    server.start_task(task)
    broadcast, client_data = server.broadcast(task, 0), image_shard(0, 1, *tasks[1][0])
    client.take_over(client_data, broadcast)
    return server, client, client_data, broadcast, client.objective(client_data, broadcast, {})


def test_at_the_first_step_the_distillation_is_at_its_minimum_if_batch_norms_are_in_evaluation_mode():
    """Its value is the teacher's entropy, its gradient 0 to rounding. By statistics of the batch it is not."""
    method = FedLwF(training())
    _, client, client_data, _, objective = second_task(method)
    images = client.trainer.standardise(client_data.inputs)
    sizes = {}
    for mode in (False, True):
        client.network.train(mode)
        scores = client.network(images)
        whole = objective.score_loss(scores, client_data.labels, images)
        plain = super(Distilled, objective).score_loss(scores, client_data.labels, images)
        [gradient] = torch.autograd.grad(whole, scores)
        sizes[mode] = float(gradient[:, :3].abs().max())
        if not mode:
            p = softmax(objective._teacher(images).double().numpy() / 2)
            entropy = -(p * np.log(p)).sum(axis=1).mean()
            assert float((whole - plain).detach()) == pytest.approx(3 * entropy, abs=1e-5)
    assert sizes[False] < 1e-7
    assert sizes[True] > 1e-4


def digest(tensors: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(
        b"".join(name.encode() + tensors[name].numpy().tobytes() for name in sorted(tensors))
    ).hexdigest()


def test_training_leaves_the_teacher_as_it_was():
    """Weights, running statistics and mode, at the client and at the server, whoever's turn it was."""
    server, client, client_data, broadcast, _ = second_task(FedLwF(training(epochs=3)))
    before = server.network.state()
    teacher = client._teacher[1]
    told = digest(teacher.state_dict())
    known = {name: value.clone() for name, value in before.items() if not name.startswith("heads.1")}
    assert same(teacher.state(), known)
    upload = turn(client, client_data, broadcast)
    assert not torch.equal(upload["body.stage1.1.running_mean"], broadcast["body.stage1.1.running_mean"])
    assert client._teacher[1] is teacher
    assert digest(teacher.state_dict()) == told
    assert not teacher.training
    assert digest({name.removeprefix("teacher.0."): value for name, value in server._teacher.items()}) == digest(known)


@pytest.mark.slow
def test_the_teacher_goes_down_once_per_client_and_task_and_nothing_more_goes_up():
    taught, plain = (federation(m) for m in (FedLwF(training()), FedAvg(training(), loss_classes="task")))
    body = sum(v.nbytes for name, v in model_of(plain).items() if name.startswith("body."))
    heads = {1: 4 * 3 * 33, 2: 4 * 5 * 33}
    for ours, theirs in zip(exchanged(taught), exchanged(plain), strict=True):
        assert (ours.up_bytes, ours.stage) == (theirs.up_bytes, theirs.stage)
        once = ours.task > 0 and ours.round == 0 and SIZES[ours.task][ours.client] > 0
        assert ours.down_bytes - theirs.down_bytes == (body + heads[ours.task] if once else 0)


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("images-task")
@pytest.mark.parametrize(("trains", "over"), [("images", "task"), ("features", "task"), ("features", "seen")])
def test_without_strength_it_is_fedavg_bit_for_bit_and_byte_for_byte(trains, over):
    knobs = training(fraction=0.5, rounds=3)
    ours = federation(FedLwF(knobs, trains=trains, loss_classes=over, strength=0.0))
    theirs = federation(FedAvg(knobs, trains=trains, loss_classes=over))
    assert same(model_of(ours), model_of(theirs))
    assert exchanged(ours) == exchanged(theirs)
    assert ours.server.state_dict().keys() == theirs.server.state_dict().keys()
    assert not same(model_of(federation(FedLwF(knobs, trains=trains, loss_classes=over))), model_of(theirs))


@pytest.mark.parametrize("trains", ["images", "features"])
def test_the_first_task_is_fedavg_bit_for_bit(trains):
    first = STREAMS[trains][1]()[:1]
    ours, theirs = (
        federation(m, first) for m in (FedLwF(training(), trains=trains), FedAvg(training(), trains=trains))
    )
    assert same(model_of(ours), model_of(theirs))


def test_a_stronger_teacher_keeps_the_old_predictions_closer():
    """Mean distance of the old classes' distribution from the teacher's on new samples, where all classes compete."""
    tasks, found = feature_tasks()[:2], []
    samples = torch.cat([samples for samples, _ in tasks[1]])
    for strength in (0.0, 1.0, 10.0, 40.0):
        told = []
        learn_images(
            FedLwF(training(rounds=6, lr=0.02), trains="features", loss_classes="seen", strength=strength),
            feature_context(INPUTS),
            tasks,
            after=lambda _, server, told=told: told.append(server.predict(samples)[:, :3].softmax(dim=1)),
        )
        found.append(float((told[1] - told[0]).abs().sum(dim=1).mean()))
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.2 * found[0]


@pytest.mark.parametrize(
    "knobs", [{"strength": -1}, {"temperature": 0}, {"temperature": None}, {"loss_classes": "old"}], ids=str
)
def test_wrong_knobs_name_the_key(knobs):
    with pytest.raises(UserError, match=rf"method\.{next(iter(knobs))}"):
        typed_instance(FedLwF, knobs, "method")
