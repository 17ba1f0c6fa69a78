"""MFCL: the generator's loss and steps against a plain version, and what it makes."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch

from fcl_bench.backbones.backbone import Trainable, copies
from fcl_bench.methods.data_free.generators.synthesis import InputStatistics, divergence
from fcl_bench.methods.data_free.mfcl import Generation
from fcl_bench.protocol.context import Context
from fcl_bench.randomness import derived_seed
from tests.methods.mfcl_harness import cross_entropy, mfcl, tasks
from tests.methods.training_harness import (
    images_stream,
    learn_images,
    tiny_context,
)
from tests.methods.whole_runs import learnt, same

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
    method = mfcl({**given, "w_bn": 0.02, "w_smooth": 3.0, "lr": 0.01, "scale": 0.7}, variant=variant)
    context, stream = tiny_context(), tasks()
    server = learn_images(method, context, stream[:1])
    network = copy.deepcopy(server.network).eval().requires_grad_(False)
    server.start_task(images_stream(stream)[1])
    with server.trainer.reproducible(derived_seed(0, "generator", 1)):
        plain = method.new_generator(context)
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


@pytest.mark.parametrize(("variant", "given", "T"), [("working", 1, 1), ("working", 4, 4), ("published", 1, 1000)])
def test_the_cross_entropy_is_of_the_logits_divided_by_the_temperature(variant, given, T):
    method = mfcl({"temperature": float(given), "w_ie": 0.0, "w_smooth": 0.0}, variant=variant)
    q = 5 * np.random.default_rng(0).standard_normal((6, 3))
    found = method.server(tiny_context()).loss(torch.zeros(6, 3, 8, 8), torch.from_numpy(q), [])
    assert float(found) == pytest.approx(cross_entropy(q / T, q.argmax(axis=1)), abs=1e-12)


def learnt_generator(temperature: float, steps: int):
    """R, and the mean confidence, of a batch of a generator after so many steps."""
    knobs = {"steps": steps, "batch_size": 32, "lr": 0.01, "temperature": temperature, "w_bn": 1.0, "scale": 0.5}
    method = mfcl(knobs, {"rounds": 8, "epochs": 3, "lr": 0.2})
    server = learn_images(method, tiny_context(), tasks()[:1])
    network = copy.deepcopy(server.network).eval()
    server.start_task(images_stream(tasks())[1])
    generator = method.new_generator(tiny_context())
    generator.load(server.made)
    with torch.no_grad(), InputStatistics(network) as statistics:
        q = network(method.images(generator, generator.noise(200, torch.Generator().manual_seed(1))))
        return float(divergence(statistics.layers())), float(q.softmax(dim=1).max(dim=1).values.mean())


@pytest.mark.slow
def test_images_come_closer_to_the_batch_norms_and_a_low_temperature_makes_them_certain():
    """At T = 1000 the cross-entropy is log |O| whatever the images are: certainty is left to the other terms."""
    (R_before, sure_before), (R_after, sure_after) = learnt_generator(1.0, 1), learnt_generator(1.0, 160)
    R_published, sure_published = learnt_generator(1000.0, 160)
    assert R_after < 0.8 * R_before
    assert R_published < 0.4 * R_before
    assert sure_after > sure_before + 0.02
    assert sure_after > sure_published + 0.1


def test_one_generator_is_kept_over_the_tasks():
    """A step size of next to nothing: the second task's generator is the first's, but for running statistics."""
    context, stream = tiny_context(), tasks()
    server = learn_images(mfcl({"lr": 1e-30}), context, stream[:2])
    first = {name: value.clone() for name, value in server.made.items()}
    server.start_task(images_stream(stream)[2])
    for name, value in server.made.items():
        assert torch.allclose(value, first[name], atol=1e-20, rtol=0) == ("running" not in name)


@pytest.mark.slow
def test_images_follow_from_the_seed():
    federations = [learnt(mfcl(), tiny_context(seed=seed), tasks()) for seed in (0, 0, 1)]
    made, again, other = (federation.server for federation in federations)
    assert same(made.made, again.made)
    assert torch.equal(made.pictures()["synthetic"].images, again.pictures()["synthetic"].images)
    assert not torch.equal(made.pictures()["synthetic"].images, other.pictures()["synthetic"].images)
    assert made.pictures()["synthetic"].tasks.tolist() == [0] * 16 + [1] * 16
    assert int(made.pictures()["synthetic"].labels[:16].max()) < 3
    assert made.privacy() == {"synthetic_images": 0}


def test_a_picture_shows_what_the_network_sees_on_the_scale_of_pixels():
    server = learn_images(mfcl(), tiny_context(), tasks()[:2])
    images, labels = server.samples_to_show(4)
    generator = server.method.new_generator(server.context).eval()
    generator.load(server.made)
    with torch.no_grad():
        u = generator(generator.noise(4, torch.Generator().manual_seed(derived_seed(0, "shown"))))
    torch.testing.assert_close(server.scale(images), u.clamp(-1, 1), atol=0.005, rtol=0)
    assert labels.shape == (4,)


def without_batch_norm() -> Context:
    context = tiny_context()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = torch.nn.Sequential(
            torch.nn.Conv2d(3, 6, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
        )
    half = (0.5, 0.5, 0.5)
    network = Trainable("plain", copies(body), 6, 8, half, half, (), {})
    return Context(6, 0, context.dtype, context.device, context.wire, network)


def test_a_network_without_batch_norm_is_told_once(caplog):
    with caplog.at_level(logging.WARNING):
        federation = learnt(mfcl(), without_batch_norm(), tasks())
    assert [record.message for record in caplog.records] == [
        "mfcl: the backbone has no BatchNorm2d, so synthetic images are not held to statistics of real ones"
    ]
    assert federation.server.made
