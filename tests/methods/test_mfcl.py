"""MFCL: both losses and the generator's steps against plain NumPy, limits, messages, and what a resumed run needs."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch

from fcl_bench.backbones.trainable import Trainable, copies
from fcl_bench.config import typed_instance
from fcl_bench.errors import UserError
from fcl_bench.methods.gradient.finetune import FineTune
from fcl_bench.methods.gradient.mfcl import MFCL, Generation, Replaying
from fcl_bench.protocol.problem import Problem
from fcl_bench.randomness import derived_seed
from fcl_bench.training.generators.batch_norm import InputStatistics, divergence
from fcl_bench.training.heads import Heads
from fcl_bench.training.knobs import Training
from fcl_bench.training.objective import Objective
from tests.methods.harness import turn
from tests.methods.test_recurring_classes import blurred_tasks
from tests.methods.training_harness import (
    federation_of,
    image_shard,
    image_tasks,
    images_stream,
    learn_images,
    tiny_problem,
)
from tests.methods.whole_runs import assert_resumes, learnt, model_of, same

#: Client 1 misses the second task, client 2 comes with it and has a single sample of the last.
SIZES = [[9, 6, 0], [8, 0, 7], [6, 6, 1]]
SMALL = {"noise": 5, "width": 4, "steps": 3, "batch_size": 8}


def training(**knobs) -> Training:
    return Training(**{"rounds": 2, "epochs": 1, "batch_size": 4, "lr": 0.05, "weighting": "uniform", **knobs})


def mfcl(generator: dict | None = None, knobs: dict | None = None, **own) -> MFCL:
    return MFCL(
        **{"training": training(**(knobs or {})), "synthetic": 6, **own},
        generator=Generation(**{**SMALL, **(generator or {})}),
    )


def tasks():
    return image_tasks(np.random.default_rng(0), [3, 2, 2], SIZES)


def softmax(q: np.ndarray) -> np.ndarray:
    e = np.exp(q - q.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def cross_entropy(q: np.ndarray, y: np.ndarray) -> float:
    return float(-np.log(softmax(q)[np.arange(len(y)), y]).mean())


# The clients' loss ----------------------------------------------------------------------------------------------------


def second_task(method: MFCL, steps: int = 0):
    """A client's half in the second task (classes 3 and 4) with its objective and a batch; `steps` rounds later."""
    problem, stream = tiny_problem(), tasks()
    server, client = learn_images(method, problem, stream[:1]), method.client(problem)
    task = images_stream(stream)[1]
    server.start_task(task)
    shard = image_shard(0, 1, *stream[1][0])
    for round_ in range(steps):
        broadcast = server.broadcast(task, round_)
        server.absorb(0, turn(client, shard, broadcast))
        server.finish_round()
    broadcast = server.broadcast(task, steps)
    client.take_over(shard, broadcast)
    return client, shard, broadcast, client.objective(shard, broadcast, {})


def by_rows(head) -> np.ndarray:
    """(c, d + 1) weights and biases."""
    return torch.cat([head.weight, head.bias[:, None]], dim=1).detach().double().numpy()


def plain_terms(client, objective: Replaying, shard, synthetic: int):
    """phi and phi' of real and synthetic images, all weights and biases, and the labels of all, in float64."""
    generator = copy.deepcopy(objective._random)
    z = torch.randn((synthetic, 5), generator=generator)
    images = client.trainer.standardise(shard.inputs)
    with torch.no_grad():
        both = torch.cat([images, client._generator(z)])
        phi, old = client.network.body(both).double().numpy(), objective._teacher.body(both).double().numpy()
    heads = [by_rows(head) for head in client.network.heads]
    V = by_rows(objective._teacher.heads[0])
    told = (old[len(images) :] @ V[:, :-1].T + V[:, -1]).argmax(axis=1)
    return images, phi, old, heads, V[:, :-1], np.concatenate([shard.labels.numpy(), told])


@pytest.mark.parametrize("weights", [{}, {"w_ft": 0.0}, {"w_kd": 0.0}, {"w_ft": 0.7, "w_kd": 3.0}], ids=str)
def test_the_clients_loss_and_the_heads_gradients_are_what_the_equations_say(weights):
    """In evaluation mode, where the features of both halves of the batch do not depend on each other."""
    method = mfcl(**weights)
    client, shard, _, objective = second_task(method, steps=1)
    client.network.eval()
    images, phi, old, [first, second], V, labels = plain_terms(client, objective, shard, 6)
    own, n = len(images), len(phi)
    W = np.concatenate([first, second])
    q = phi @ W[:, :-1].T + W[:, -1]
    apart = ((phi - old) @ V.T) ** 2
    assert apart.max() > 1e-6
    wanted = cross_entropy(q[:own, 3:], labels[:own] - 3)
    wanted += method.w_ft * cross_entropy(q, labels) + method.w_kd * apart.sum(axis=1).mean() / 3
    found = objective.loss(client.network, images, shard.labels)
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
    client, shard, _, objective = second_task(mfcl(w_kd=0.0))
    network, images = client.network.eval(), client.trainer.standardise(shard.inputs)
    body = list(network.body.parameters())
    ours = torch.autograd.grad(objective.loss(network, images, shard.labels), body)
    plain = Objective(Heads(((0, 1, 2), (3, 4)), (3, 4)), "task")
    theirs = torch.autograd.grad(plain.loss(network, images, shard.labels), body)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_at_the_first_step_nothing_is_to_be_distilled_if_batch_norms_are_in_evaluation_mode():
    sizes = {}
    for weight in (0.0, 1.0):
        client, shard, _, objective = second_task(mfcl(w_ft=0.5, w_kd=weight))
        images = client.trainer.standardise(shard.inputs)
        for mode in (False, True):
            objective._random.manual_seed(0)
            network = copy.deepcopy(client.network).train(mode)
            sizes[weight, mode] = float(objective.loss(network, images, shard.labels).detach())
    assert sizes[1.0, False] == sizes[0.0, False]
    assert sizes[1.0, True] > sizes[0.0, True]


@pytest.mark.parametrize(("variant", "passes"), [("working", 1), ("published", 2)])
def test_batch_norms_move_once_per_step_and_twice_in_the_published_code(variant, passes):
    client, shard, _, objective = second_task(mfcl(variant=variant))
    network = client.network.train()
    norm = network.body.stage1[1]
    before, mean = int(norm.num_batches_tracked), norm.running_mean.clone()
    objective.loss(network, client.trainer.standardise(shard.inputs), shard.labels)
    assert int(norm.num_batches_tracked) - before == passes
    objective._random = torch.Generator().manual_seed(objective_seed(client, shard))
    images = torch.cat(
        [client.trainer.standardise(shard.inputs), client._generator(client._generator.noise(6, objective._random))]
    )
    with torch.no_grad():
        seen = network.body.stage1[0](images).mean(dim=(0, 2, 3))
    expected = 0.9**passes * mean + (1 - 0.9**passes) * seen
    torch.testing.assert_close(norm.running_mean, expected, atol=1e-6, rtol=1e-4)


def objective_seed(client, shard) -> int:
    return derived_seed(client.problem.seed, "synthetic", shard.task, 0, shard.client)


def test_training_leaves_the_teacher_and_the_generator_as_they_were_and_real_batches_too(monkeypatch):
    client, shard, broadcast, objective = second_task(mfcl())
    before = copy.deepcopy([objective._teacher.state_dict(), client._generator.state_dict()])
    batches: dict[type, list[torch.Tensor]] = {Replaying: [], Objective: []}
    for kind in batches:

        def keeping(self, network, inputs, labels, kind=kind, loss=kind.loss):
            if type(self) is kind:
                batches[kind].append(inputs.clone())
            return loss(self, network, inputs, labels)

        monkeypatch.setattr(kind, "loss", keeping)
    upload = turn(client, shard, broadcast)
    assert not torch.equal(upload["heads.0.weight"], broadcast["heads.0.weight"])
    assert same(objective._teacher.state_dict(), before[0])
    assert same(client._generator.state_dict(), before[1])
    assert not client._generator.training
    turn(FineTune(training(), loss_over="task").client(client.problem), shard, broadcast)
    assert len(batches[Replaying]) == 2
    assert all(torch.equal(a, b) for a, b in zip(*batches.values(), strict=True))


# The generator --------------------------------------------------------------------------------------------------------


def plain_blur(u: torch.Tensor, spread: float) -> torch.Tensor:
    """Shifts of the mirrored images, added up; `spread` is 2 sigma^2."""
    padded = torch.nn.functional.pad(u, (2, 2, 2, 2), mode="reflect")
    h, w = u.shape[2:]
    total, mass = torch.zeros_like(u), 0.0
    for dy in range(5):
        for dx in range(5):
            weight = float(np.exp(-((dy - 2) ** 2 + (dx - 2) ** 2) / spread))
            total, mass = total + weight * padded[:, :, dy : dy + h, dx : dx + w], mass + weight
    return total / mass


def plain_generator_loss(network, u: torch.Tensor, T: float, spread: float, knobs: Generation) -> torch.Tensor:
    """Layer by layer through `Tiny`, with the statistics of the batch norms' inputs."""
    R, maps = [], u
    for stage in (network.body.stage1, network.body.stage2, network.body.stage3, network.body.stage4):
        conv, norm, _ = stage
        maps = torch.nn.functional.conv2d(maps, conv.weight, stride=conv.stride, padding=1)
        rows = maps.permute(1, 0, 2, 3).flatten(1)
        mu, s = rows.mean(dim=1), (rows - rows.mean(dim=1, keepdim=True)).square().mean(dim=1)
        m, v = norm.running_mean, norm.running_var
        R.append((torch.log(s.sqrt() / v.sqrt()) - 0.5 * (1 - (v + (m - mu) ** 2) / s)).mean())
        scale = (norm.weight / (v + norm.eps).sqrt())[:, None, None]
        maps = ((maps - m[:, None, None]) * scale + norm.bias[:, None, None]).relu()
    phi = maps.mean(dim=(2, 3))
    q = torch.cat([phi @ head.weight.T + head.bias for head in network.heads], dim=1)
    p = q.softmax(dim=1)
    chosen = q.argmax(dim=1)
    loss = -((q / T).log_softmax(dim=1)[torch.arange(len(q)), chosen]).mean()
    mean = p.mean(dim=0)
    loss = loss + knobs.w_ie * (1 + sum(c * torch.log(c) for c in mean) / np.log(len(mean)))
    loss = loss + knobs.w_bn * sum(R) / len(R)
    return loss + knobs.w_smooth * (u - plain_blur(u, spread)).square().mean()


@pytest.mark.parametrize(
    ("variant", "T", "spread"), [("working", 1.0, 2.0), ("working", 3.0, 2.0), ("published", 1000.0, 4.0)]
)
def test_the_generators_steps_are_adams_on_the_plain_loss(variant, T, spread):
    given = {} if variant == "published" else {"temperature": T}
    method = mfcl({**given, "w_smooth": 0.3, "lr": 0.01, "scale": 0.7}, variant=variant)
    problem, stream = tiny_problem(), tasks()
    server = learn_images(method, problem, stream[:1])
    network = copy.deepcopy(server.network).eval().requires_grad_(False)
    server.start_task(images_stream(stream)[1])
    with server.trainer.reproducible(derived_seed(0, "generator", 1)):
        plain = method.new_generator(problem)
        moments = {name: [torch.zeros_like(value)] * 2 for name, value in plain.named_parameters()}
        for step in range(1, 4):
            loss = plain_generator_loss(network, 0.7 * plain(torch.randn(8, 5)), T, spread, method.generator)
            plain.zero_grad()
            loss.backward()
            for name, value in plain.named_parameters():
                first, second = moments[name]
                first, second = 0.9 * first + 0.1 * value.grad, 0.999 * second + 0.001 * value.grad**2
                moments[name] = [first, second]
                change = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
                # A bias before a batch norm has no gradient but rounding, of which Adam makes whole steps.
                if value.grad.abs().max() > 1e-5:
                    value.data -= 0.01 * change
    for name, value in plain.state().items():
        if name in ("first.bias", "second.bias", "third.bias"):
            continue
        # Those biases move the means of what follows them.
        close = {"atol": 0.02 if "running_mean" in name else 2e-3 if "running" in name else 2e-4, "rtol": 1e-3}
        torch.testing.assert_close(server.made[name], value, **close, msg=lambda told, name=name: f"{name}: {told}")


def learnt_generator(temperature: float, steps: int):
    """R, and the mean confidence, of a batch of a generator after so many steps."""
    knobs = {"steps": steps, "batch_size": 32, "lr": 0.01, "temperature": temperature, "w_bn": 1.0, "scale": 0.5}
    method = mfcl(knobs, {"rounds": 8, "epochs": 3, "lr": 0.2})
    server = learn_images(method, tiny_problem(), tasks()[:1])
    network = copy.deepcopy(server.network).eval()
    server.start_task(images_stream(tasks())[1])
    generator = method.new_generator(tiny_problem())
    generator.load(server.made)
    with torch.no_grad(), InputStatistics(network) as statistics:
        q = network(method.images(generator, generator.noise(200, torch.Generator().manual_seed(1))))
        return float(divergence(statistics.layers())), float(q.softmax(dim=1).max(dim=1).values.mean())


def test_images_come_closer_to_the_batch_norms_and_a_low_temperature_makes_them_certain():
    """At T = 1000 the cross-entropy is log |O| whatever the images are: certainty is left to the other terms."""
    (R_before, sure_before), (R_after, sure_after) = learnt_generator(1.0, 1), learnt_generator(1.0, 40)
    R_published, sure_published = learnt_generator(1000.0, 40)
    assert R_after < 0.8 * R_before
    assert R_published < 0.4 * R_before
    assert sure_after > sure_before + 0.02
    assert sure_after > sure_published + 0.1


def test_one_generator_is_kept_over_the_tasks():
    """A step size of next to nothing: the second task's generator is the first's, but for running statistics."""
    problem, stream = tiny_problem(), tasks()
    server = learn_images(mfcl({"lr": 1e-30}), problem, stream[:2])
    first = {name: value.clone() for name, value in server.made.items()}
    server.start_task(images_stream(stream)[2])
    for name, value in server.made.items():
        assert torch.allclose(value, first[name], atol=1e-20, rtol=0) == ("running" not in name)


def test_images_follow_from_the_seed():
    federations = [learnt(mfcl(), tiny_problem(seed=seed), tasks()) for seed in (0, 0, 1)]
    made, again, other = (federation.server for federation in federations)
    assert same(made.made, again.made)
    assert torch.equal(made.pictures()["synthetic"].images, again.pictures()["synthetic"].images)
    assert not torch.equal(made.pictures()["synthetic"].images, other.pictures()["synthetic"].images)
    assert made.pictures()["synthetic"].tasks.tolist() == [0] * 16 + [1] * 16
    assert int(made.pictures()["synthetic"].labels[:16].max()) < 3
    assert made.privacy() == {"synthetic_images": 0}


def test_a_picture_shows_what_the_network_sees_on_the_scale_of_pixels():
    server = learn_images(mfcl(), tiny_problem(), tasks()[:2])
    images, labels = server.samples_to_show(4)
    generator = server.method.new_generator(server.problem).eval()
    generator.load(server.made)
    with torch.no_grad():
        u = generator(generator.noise(4, torch.Generator().manual_seed(derived_seed(0, "shown"))))
    torch.testing.assert_close(server.scale(images), u.clamp(-1, 1), atol=0.005, rtol=0)
    assert labels.shape == (4,)


def without_batch_norm() -> Problem:
    problem = tiny_problem()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = torch.nn.Sequential(
            torch.nn.Conv2d(3, 6, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
        )
    half = (0.5, 0.5, 0.5)
    network = Trainable("plain", copies(body), 6, 8, half, half, (), {})
    return Problem(6, 0, problem.dtype, problem.device, problem.wire, network)


def test_a_network_without_batch_norm_is_told_once(caplog):
    with caplog.at_level(logging.WARNING):
        federation = learnt(mfcl(), without_batch_norm(), tasks())
    assert [record.message for record in caplog.records] == [
        "mfcl: the backbone has no BatchNorm2d, so synthetic images are not held to statistics of real ones"
    ]
    assert federation.server.made


# Limits, messages, whole runs -----------------------------------------------------------------------------------------


def test_without_weights_it_is_finetune_bit_for_bit_and_byte_for_byte():
    ours = learnt(mfcl(w_ft=0.0, w_kd=0.0), tiny_problem(), tasks())
    theirs = learnt(FineTune(training(), loss_over="task"), tiny_problem(), tasks())
    assert same(model_of(ours), model_of(theirs))
    assert ours.server.state_dict().keys() == theirs.server.state_dict().keys()
    rows = [[(r.stage, r.up_bytes, r.down_bytes) for r in f.state.ledger.uploads] for f in (ours, theirs)]
    assert rows[0] == rows[1]
    for weights in ({"w_ft": 1.0, "w_kd": 0.0}, {"w_ft": 0.0, "w_kd": 1.0}):
        assert not same(model_of(learnt(mfcl(**weights), tiny_problem(), tasks())), model_of(theirs))


def test_the_first_task_is_finetune_bit_for_bit():
    ours, theirs = (
        learnt(method, tiny_problem(), tasks()[:1]) for method in (mfcl(), FineTune(training(), loss_over="task"))
    )
    assert same(model_of(ours), model_of(theirs))
    assert not ours.server.made


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_the_old_model_and_the_generator_go_down_once_per_client_and_task(wire):
    problem = tiny_problem(wire=wire)
    ours = learnt(mfcl(), problem, tasks())
    theirs = learnt(FineTune(training(), loss_over="task"), problem, tasks())
    body = sum(value.nbytes for name, value in model_of(theirs).items() if name.startswith("body."))
    N, w, s = 5, 4, 2
    G = 4 * (w * s * s * (N + 1) + 9 * w * w + 9 * w * w // 2 + 25 * w + 9)
    assert ours.server.report()["generator_bytes"] == G
    for own, plain in zip(ours.state.ledger.uploads, theirs.state.ledger.uploads, strict=True):
        assert own.up_bytes == plain.up_bytes
        teacher = body + 4 * 33 * (3 if own.task == 1 else 5)
        once = own.task > 0 and own.round == 0 and SIZES[own.task][own.client] > 0
        assert own.down_bytes - plain.down_bytes == (teacher + G if once else 0)


def test_a_run_that_is_resumed_after_any_round_is_the_same_bit_for_bit():
    whole, saved = assert_resumes(
        lambda: federation_of(mfcl(knobs={"fraction": 0.7}), tiny_problem(), tasks(), unlabelled=[(1, 2)])
    )
    assert whole.server.made
    assert len(saved) == 6


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
    federation = learnt(mfcl(frozen_heads=frozen_heads), tiny_problem(), stream)
    assert any(len(task.new_columns) < len(task.columns) for task in federation.stream.tasks[1:])
    assert all(bool(torch.isfinite(value).all()) for value in model_of(federation).values())


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"send": "images"}, r"^method\.send=images: .*\(method\.send=generator; method=target sends images\)$"),
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
    with pytest.raises(UserError, match=r"^method\.on=features"):
        mfcl(on="features").check(tiny_problem(), [2])
    with pytest.raises(UserError, match=r"^method\.generator\.w_smooth=0\.001: images of 2 pixels"):
        mfcl().check(tiny_problem(size=2), [2])
    mfcl({"w_smooth": 0.0}).check(tiny_problem(size=2), [2])
    mfcl(w_ft=0.0, w_kd=0.0).check(tiny_problem(size=2), [2])


def test_a_generator_that_diverges_is_told():
    with pytest.raises(UserError, match=r"^method\.generator\.lr=1e\+30: the generator diverged \(a smaller"):
        learnt(mfcl({"lr": 1e30, "steps": 5}), tiny_problem(), tasks())
