"""MFCL: the clients' loss against plain NumPy, limits, messages, and what a resumed run needs."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.data_free.mfcl import MFCL, Replaying
from fcl_bench.randomness import derived_seed
from fcl_bench.training.network import Heads
from fcl_bench.training.objective import Objective
from fcl_bench.typed import typed_instance
from tests.methods.harness import turn
from tests.methods.mfcl_harness import SIZES, cross_entropy, mfcl, second_task, softmax, tasks, training
from tests.methods.test_recurring_classes import blurred_tasks
from tests.methods.training_harness import (
    tiny_context,
)
from tests.methods.whole_runs import learnt, model_of, same

# The clients' loss ----------------------------------------------------------------------------------------------------


def by_rows(head) -> np.ndarray:
    """(c, d + 1) weights and biases."""
    return torch.cat([head.weight, head.bias[:, None]], dim=1).detach().double().numpy()


def plain_terms(client, objective: Replaying, client_data, synthetic: int):
    """phi and phi' of real and synthetic images, all weights and biases, and the labels of all, in float64."""
    generator = copy.deepcopy(objective._random)
    z = torch.randn((synthetic, 5), generator=generator)
    images = client.trainer.standardise(client_data.inputs)
    with torch.no_grad():
        both = torch.cat([images, client._generator(z)])
        phi, old = client.network.body(both).double().numpy(), objective._teacher.body(both).double().numpy()
    heads = [by_rows(head) for head in client.network.heads]
    V = by_rows(objective._teacher.heads[0])
    told = (old[len(images) :] @ V[:, :-1].T + V[:, -1]).argmax(axis=1)
    return images, phi, old, heads, V[:, :-1], np.concatenate([client_data.labels.numpy(), told])


@pytest.mark.parametrize("weights", [{}, {"w_ft": 0.0}, {"w_kd": 0.0}, {"w_ft": 0.7, "w_kd": 3.0}], ids=str)
def test_the_clients_loss_and_the_heads_gradients_are_what_the_equations_say(weights):
    """In evaluation mode, where the features of both halves of the batch do not depend on each other."""
    method = mfcl(**weights)
    client, client_data, _, objective = second_task(method, steps=1)
    client.network.eval()
    images, phi, old, [first, second], V, labels = plain_terms(client, objective, client_data, 6)
    own, n = len(images), len(phi)
    W = np.concatenate([first, second])
    q = phi @ W[:, :-1].T + W[:, -1]
    apart = ((phi - old) @ V.T) ** 2
    assert apart.max() > 1e-6
    wanted = cross_entropy(q[:own, 3:], labels[:own] - 3)
    wanted += method.w_ft * cross_entropy(q, labels) + method.w_kd * apart.sum(axis=1).mean() / 3
    found = objective.loss(client.network, images, client_data.labels)
    assert float(found.detach()) == pytest.approx(wanted, abs=1e-5)

    client.network.zero_grad()
    found.backward()
    of_task = np.zeros((n, 5))
    of_task[:own, 3:] = (softmax(q[:own, 3:]) - np.eye(2)[labels[:own] - 3]) / own
    direction = of_task + method.w_ft * (softmax(q) - np.eye(5)[labels]) / n
    known = [head for head in client.network.heads if head.weight.grad is not None]
    assert len(known) == (2 if method.w_ft else 1) or not direction[:, :3].any()
    for kind, gradient in (("weight", direction.T @ phi), ("bias", direction.sum(axis=0))):
        ours = torch.cat([getattr(head, kind).grad for head in known])
        np.testing.assert_allclose(ours.numpy(), gradient[-len(ours) :], atol=1e-6)


def test_the_loss_of_all_classes_teaches_heads_and_no_feature():
    """With w_kd = 0 the body's gradient is that of the loss on the task's classes alone."""
    client, client_data, _, objective = second_task(mfcl(w_kd=0.0))
    network, images = client.network.eval(), client.trainer.standardise(client_data.inputs)
    body = list(network.body.parameters())
    ours = torch.autograd.grad(objective.loss(network, images, client_data.labels), body)
    plain = Objective(Heads(((0, 1, 2), (3, 4)), (3, 4)), "task")
    theirs = torch.autograd.grad(plain.loss(network, images, client_data.labels), body)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_at_the_first_step_nothing_is_to_be_distilled_if_batch_norms_are_in_evaluation_mode():
    sizes = {}
    for weight in (0.0, 1.0):
        client, client_data, _, objective = second_task(mfcl(w_ft=0.5, w_kd=weight))
        images = client.trainer.standardise(client_data.inputs)
        for mode in (False, True):
            objective._random.manual_seed(0)
            network = copy.deepcopy(client.network).train(mode)
            sizes[weight, mode] = float(objective.loss(network, images, client_data.labels).detach())
    assert sizes[1.0, False] == sizes[0.0, False]
    assert sizes[1.0, True] > sizes[0.0, True]


@pytest.mark.parametrize(("variant", "passes"), [("working", 1), ("published", 2)])
def test_batch_norms_move_once_per_step_and_twice_in_the_published_code(variant, passes):
    client, client_data, _, objective = second_task(mfcl(variant=variant))
    network = client.network.train()
    norm = network.body.stage1[1]
    before, mean = int(norm.num_batches_tracked), norm.running_mean.clone()
    objective.loss(network, client.trainer.standardise(client_data.inputs), client_data.labels)
    assert int(norm.num_batches_tracked) - before == passes
    objective._random = torch.Generator().manual_seed(objective_seed(client, client_data))
    images = torch.cat(
        [
            client.trainer.standardise(client_data.inputs),
            client._generator(client._generator.noise(6, objective._random)),
        ]
    )
    with torch.no_grad():
        seen = network.body.stage1[0](images).mean(dim=(0, 2, 3))
    expected = 0.9**passes * mean + (1 - 0.9**passes) * seen
    torch.testing.assert_close(norm.running_mean, expected, atol=1e-6, rtol=1e-4)


def objective_seed(client, client_data) -> int:
    return derived_seed(client.context.seed, "synthetic", client_data.task, 0, client_data.client)


def test_training_leaves_the_teacher_and_the_generator_as_they_were_and_real_batches_too(monkeypatch):
    client, client_data, broadcast, objective = second_task(mfcl())
    before = copy.deepcopy([objective._teacher.state_dict(), client._generator.state_dict()])
    batches: dict[type, list[torch.Tensor]] = {Replaying: [], Objective: []}
    for kind in batches:

        def keeping(self, network, inputs, labels, kind=kind, loss=kind.loss):
            if type(self) is kind:
                batches[kind].append(inputs.clone())
            return loss(self, network, inputs, labels)

        monkeypatch.setattr(kind, "loss", keeping)
    upload = turn(client, client_data, broadcast)
    assert not torch.equal(upload["heads.0.weight"], broadcast["heads.0.weight"])
    assert same(objective._teacher.state_dict(), before[0])
    assert same(client._generator.state_dict(), before[1])
    assert not client._generator.training
    turn(FedAvg(training(), loss_classes="task").client(client.context), client_data, broadcast)
    assert len(batches[Replaying]) == 2
    assert all(torch.equal(a, b) for a, b in zip(*batches.values(), strict=True))


# Limits, messages, whole runs -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_weights_it_is_fedavg_bit_for_bit_and_byte_for_byte():
    ours = learnt(mfcl(w_ft=0.0, w_kd=0.0), tiny_context(), tasks())
    theirs = learnt(FedAvg(training(), loss_classes="task"), tiny_context(), tasks())
    assert same(model_of(ours), model_of(theirs))
    rows = [[(r.stage, r.up_bytes, r.down_bytes) for r in f.state.ledger.uploads] for f in (ours, theirs)]
    assert rows[0] == rows[1]
    for weights in ({"w_ft": 1.0, "w_kd": 0.0}, {"w_ft": 0.0, "w_kd": 1.0}):
        assert not same(model_of(learnt(mfcl(**weights), tiny_context(), tasks())), model_of(theirs))


def test_the_first_task_is_fedavg_bit_for_bit():
    ours, theirs = (
        learnt(method, tiny_context(), tasks()[:1]) for method in (mfcl(), FedAvg(training(), loss_classes="task"))
    )
    assert same(model_of(ours), model_of(theirs))
    assert not ours.server.made


@pytest.mark.slow_cases("float32")
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_the_old_model_and_the_generator_go_down_once_per_client_and_task(wire):
    context = tiny_context(wire=wire)
    ours = learnt(mfcl(), context, tasks())
    theirs = learnt(FedAvg(training(), loss_classes="task"), context, tasks())
    body = sum(value.nbytes for name, value in model_of(theirs).items() if name.startswith("body."))
    N, w, s = 5, 4, 2
    G = 4 * (w * s * s * (N + 1) + 9 * w * w + 9 * w * w // 2 + 25 * w + 9)
    assert ours.server.report()["generator_bytes"] == G
    for own, plain in zip(ours.state.ledger.uploads, theirs.state.ledger.uploads, strict=True):
        assert own.up_bytes == plain.up_bytes
        teacher = body + 4 * 33 * (3 if own.task == 1 else 5)
        once = own.task > 0 and own.round == 0 and SIZES[own.task][own.client] > 0
        assert own.down_bytes - plain.down_bytes == (teacher + G if once else 0)


@pytest.mark.parametrize("frozen_heads", [False, True])
def test_classes_that_come_back_are_learnt_beside_synthetic_ones(frozen_heads):
    found, _, _ = blurred_tasks(np.random.default_rng(0), tasks=3)
    rng = np.random.default_rng(1)
    stream = [
        [
            (torch.from_numpy(rng.integers(0, 256, (len(y), 3, 8, 8)).astype(np.uint8)), torch.from_numpy(y))
            for _, y in t
        ]
        for t in found
    ]
    federation = learnt(mfcl(frozen_heads=frozen_heads), tiny_context(), stream)
    assert any(len(task.new_columns) < len(task.columns) for task in federation.stream.tasks[1:])
    assert all(bool(torch.isfinite(value).all()) for value in model_of(federation).values())


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        (
            {"variant": "published", "generator": {"temperature": 5.0}},
            r"^method\.generator\.temperature=5 contradicts method\.variant=published \(1000, or method\.variant=w",
        ),
        ({"w_ft": -1}, r"method\.w_ft"),
        ({"w_kd": None}, r"method\.w_kd"),
        ({"synthetic": 0}, r"method\.synthetic"),
        ({"variant": "paper"}, r"method\.variant"),
        ({"generator": {"steps": 0}}, r"method\.generator\.steps"),
        ({"generator": {"width": 1}}, r"method\.generator\.width"),
        ({"generator": {"temperature": 0}}, r"method\.generator\.temperature"),
    ],
    ids=str,
)
def test_wrong_knobs_name_the_key(knobs, told):
    with pytest.raises(UserError, match=told):
        typed_instance(MFCL, knobs, "method")


def test_features_and_images_too_small_to_blur_are_refused():
    with pytest.raises(UserError, match=r"^method\.trains=features"):
        mfcl(trains="features").check(tiny_context(), [2])
    with pytest.raises(UserError, match=r"^method\.generator\.w_smooth=0\.001: images of 2 pixels"):
        mfcl().check(tiny_context(size=2), [2])
    mfcl({"w_smooth": 0.0}).check(tiny_context(size=2), [2])
    mfcl(w_ft=0.0, w_kd=0.0).check(tiny_context(size=2), [2])


def test_a_generator_that_diverges_is_told():
    with pytest.raises(UserError, match=r"^method\.generator\.lr=1e\+30: the generator diverged \(a smaller"):
        learnt(mfcl({"lr": 1e30, "steps": 5}), tiny_context(), tasks())
