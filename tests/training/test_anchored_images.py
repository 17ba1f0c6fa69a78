"""LANDER's images: the noisy layers, the loss against the equations, the student, and what images become of it."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from fcl_bench.data.images.batches import Augment, Standardise
from fcl_bench.errors import UserError
from fcl_bench.methods.data_free.generators.anchored import (
    AnchoredGenerator,
    AnchoredInversion,
    MappedNetwork,
    NoisyLayers,
    Synthesis,
    balanced,
    random_anchors,
)
from fcl_bench.methods.data_free.generators.images import opposition
from fcl_bench.randomness import seeded
from fcl_bench.training.network import Network
from tests.methods.classical_oracle import softmax
from tests.methods.training_harness import tiny_context

CLASSES, SIZE, SIDE = 3, 6, 8
SMALL = {"batch": 12, "warmup": 1, "batches": 2, "noise": 5, "g_steps": 3, "kd_steps": 2, "images": 20}


def teacher(double: bool = False) -> MappedNetwork:
    """With running statistics that are not those of a new network."""
    network = MappedNetwork(tiny_context(SIDE).network, SIZE, seed=1)
    network.grow([2, 1], seed=2)
    with seeded(3), torch.no_grad():
        network.train()
        for _ in range(20):
            network(torch.randn(16, 3, SIDE, SIDE))
    return (network.double() if double else network).eval().requires_grad_(False)


def learnt() -> MappedNetwork:
    """A teacher of three classes of noise around an image each."""
    network = teacher()
    network.requires_grad_(True).train()
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    with seeded(11):
        centres = torch.randn(CLASSES, 3, SIDE, SIDE)
        for _ in range(40):
            labels = torch.arange(24) % CLASSES
            loss = torch.nn.functional.cross_entropy(network(centres[labels] + torch.randn(24, 3, SIDE, SIDE)), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    assert float(loss.detach()) < 0.1
    return network.eval().requires_grad_(False)


def inversion(network=None, knobs=None, augment="none", pull=5.0, radius=0.015, autocast=nullcontext):
    anchors = random_anchors(range(CLASSES), SIZE, seed=4)
    network = network or teacher()
    anchors = anchors.to(next(network.parameters()).dtype)
    standardise = Standardise(SIDE, (0.5,) * 3, (0.5,) * 3)
    knobs = Synthesis(**{**SMALL, **(knobs or {})})
    with seeded(5):
        return AnchoredInversion(knobs, network, anchors, pull, radius, standardise, Augment(augment), 6, autocast)


# Which batches --------------------------------------------------------------------------------------------------------


def test_41_batches_are_kept_and_the_student_plays_a_part_from_the_13th_on():
    """`warmup <= ep` and `ep - 1 > warmup + 1` for ep from 1 to 50, in the public code."""
    knobs = Synthesis()
    assert [number for number in knobs.numbers if knobs.keeps(number)] == list(range(10, 51))
    assert [number for number in knobs.numbers if knobs.opposes(number)] == list(range(13, 51))
    assert knobs.stored == 41 * 256 == 10496
    assert not any(Synthesis(adv=0).opposes(number) for number in knobs.numbers)
    assert Synthesis(warmup=0, batches=3, batch=10).stored == 30


def test_batches_are_made_kept_and_taught_in_that_order(monkeypatch):
    """With 20 of 36 images used, lessons are on the first 20."""
    made, lessons = [], []
    ours = inversion(knobs={"warmup": 2, "batches": 3})
    monkeypatch.setattr(
        ours,
        "batch",
        lambda labels, adversarial: made.append(adversarial) or torch.full((12, 3, 8, 8), len(made) / 255),
    )
    monkeypatch.setattr(ours, "teach", lambda images: lessons.append(images[:, 0, 0, 0].tolist()))
    images, labels = ours.run()
    assert made == [False, False, False, False, True]
    assert images.shape == (4 * 12, 3, 8, 8)
    assert images[:, 0, 0, 0].tolist() == [2] * 12 + [3] * 12 + [4] * 12 + [5] * 12
    assert lessons == [[2] * 12, *[[2] * 12 + [3] * 8] * 3]
    assert labels.bincount().tolist() == [16] * 3


def test_classes_are_balanced():
    with seeded(0):
        found = [balanced(11, 3) for _ in range(50)]
    assert all(labels[:9].tolist() == [0, 1, 2] * 3 for labels in found)
    assert {int(label) for labels in found for label in labels[9:]} == {0, 1, 2}
    assert balanced(2, 5).shape == (2,)


# The generator --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [7, 10, 23, 30])
def test_each_noisy_layer_serves_ten_rows(count):
    with seeded(count):
        layers = NoisyLayers(30, 4, 6)
        layers.renew()
        torch.nn.init.normal_(layers.bias)
        rows = torch.randn(count, 4)
    expected = [row @ layers.weight[place // 10] + layers.bias[place // 10, 0] for place, row in enumerate(rows)]
    np.testing.assert_allclose(layers(rows).detach().numpy(), torch.stack(expected).detach().numpy(), rtol=1e-5)
    assert layers.weight.shape[0] == 3
    assert NoisyLayers(256, 512, 256).weight.shape == (26, 512, 256)


def test_noise_is_new_standard_normal_weights_and_no_biases():
    layers = NoisyLayers(300, 40, 50)
    with seeded(1):
        layers.renew()
        first = layers.weight.detach().clone()
        torch.nn.init.ones_(layers.bias)
        layers.renew()
    assert not layers.bias.any()
    assert not torch.equal(first, layers.weight)
    assert float(first.mean()) == pytest.approx(0, abs=0.02)
    assert float(first.std()) == pytest.approx(1, abs=0.02)


def test_images_are_from_0_to_1_and_differ_by_layer_and_anchor():
    with seeded(1):
        generator = AnchoredGenerator(SIZE, 5, SIDE, 20)
        generator.noisy.renew()
    anchors = random_anchors(range(2), SIZE, 0)
    images = generator(anchors[[0] * 10 + [0] * 5 + [1] * 5])
    assert images.shape == (20, 3, SIDE, SIDE)
    assert 0 <= float(images.detach().min()) < float(images.detach().max()) <= 1
    # Those of one class and one layer are one image: that is how little noise there is.
    assert torch.allclose(images[0], images[9], atol=1e-6)
    assert not torch.allclose(images[0], images[10], atol=1e-3)
    assert not torch.allclose(images[10], images[15], atol=1e-3)


# The loss -------------------------------------------------------------------------------------------------------------


def by_hand(network: Network, images: torch.Tensor) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Features (b, d), and mean and variance of every batch norm's inputs, layer by layer in NumPy's float64."""
    maps, statistics = images.detach(), []
    for stage in list(network.body)[:4]:
        maps = torch.nn.functional.conv2d(maps, stage[0].weight, None, stage[0].stride, stage[0].padding)
        z = maps.detach().numpy()
        statistics.append((z.mean(axis=(0, 2, 3)), z.var(axis=(0, 2, 3))))
        m, v, g, b = (
            value.detach().numpy()[:, None, None]
            for value in (stage[1].running_mean, stage[1].running_var, stage[1].weight, stage[1].bias)
        )
        maps = torch.from_numpy(np.maximum((z - m) / np.sqrt(v + 1e-5) * g + b, 0))
    return maps.numpy().mean(axis=(2, 3)), statistics


def affine(layer: torch.nn.Linear, features: np.ndarray) -> np.ndarray:
    return features @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()


@pytest.mark.parametrize("adversarial", [False, True])
def test_the_loss_is_what_the_equations_say(adversarial):
    """All four terms in NumPy, with the learnt mean and deviation; R averages over batches, 0.9 of the earlier ones."""
    network = teacher(double=True)
    ours = inversion(network, {"bn": 0.7, "oh": 0.3, "adv": 0.4})
    ours.student.double()
    ours.mean, ours.std = torch.full((1, 3, 1, 1), 0.4).double(), torch.full((1, 3, 1, 1), 0.3).double()
    with seeded(6), torch.no_grad():
        first, second = torch.rand(2, 12, 3, SIDE, SIDE).double()
        for head in network.heads:  # else all images are of one class
            head.bias.sub_(head(network.body((second - 0.4) / 0.3)).mean(dim=0))
        ours.student.load_state_dict(network.state_dict())
        for head in ours.student.heads:
            head.bias.add_(ours.student(second).std(dim=0).mean() * torch.randn(head.bias.shape))
    ours.student.eval()
    labels = torch.arange(12) % CLASSES
    _, layers = ours.loss(first, labels, adversarial)
    ours._distance.keep(layers)
    found, _ = ours.loss(second, labels, adversarial)

    _, before = by_hand(network, (first - 0.4) / 0.3)
    phi, now = by_hand(network, (second - 0.4) / 0.3)
    norms = [stage[1] for stage in list(network.body)[:4]]
    R = sum(
        np.linalg.norm(norm.running_var.numpy() - 0.9 * v0 - 0.1 * v)
        + np.linalg.norm(norm.running_mean.numpy() - 0.9 * m0 - 0.1 * m)
        for norm, (m0, v0), (m, v) in zip(norms, before, now, strict=True)
    )
    q = np.concatenate([affine(head, phi) for head in network.heads], axis=1)
    p, y = softmax(q), labels.numpy()
    expected = 0.7 * R - 0.3 * np.log(p[np.arange(12), y]).mean()
    anchors = random_anchors(range(CLASSES), SIZE, seed=4).double().numpy()
    expected += 5 * max(((affine(network.mapping, phi) - anchors[y]) ** 2).mean() - 0.015, 0)
    if adversarial:
        psi, _ = by_hand(ours.student, (second - 0.4) / 0.3)
        s = np.concatenate([affine(head, psi) for head in ours.student.heads], axis=1)
        agree = s.argmax(axis=1) == q.argmax(axis=1)
        assert 0 < agree.sum() < 12
        expected -= 0.4 * (agree * (p * (np.log(p) - np.log(softmax(s)))).sum(axis=1)).mean()
    assert float(found.detach()) == pytest.approx(expected, rel=1e-6)  # logits are taken in float32


@pytest.mark.parametrize("off", ["bn", "oh", "pull"])
def test_a_term_of_weight_0_is_left_out(off):
    network, (images, labels) = teacher(), (torch.rand(12, 3, SIDE, SIDE), torch.arange(12) % CLASSES)
    knobs = {name: 0.0 for name in ("bn", "oh") if name == off}
    pull = 0.0 if off == "pull" else 5.0
    part = float(inversion(network, knobs, pull=pull).loss(images, labels, False)[0].detach())
    whole = float(inversion(network).loss(images, labels, False)[0].detach())
    others = {"bn": 0.0, "oh": 0.0, off: 1.0 if off == "bn" else 0.5}
    others.pop("pull", None)
    alone = float(
        inversion(network, others, pull=5.0 if off == "pull" else 0.0).loss(images, labels, False)[0].detach()
    )
    assert alone > 0.001
    assert whole == pytest.approx(part + alone, rel=1e-5)


def test_opposition_counts_only_where_both_agree():
    student = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    wanted = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    wanted[0, 0] = 1.0
    p, s = softmax(np.array([[1.0, 0.0]])), softmax(np.array([[2.0, 0.0]]))
    assert float(opposition(student, wanted)) == pytest.approx(-(p * np.log(p / s)).sum() / 2, rel=1e-5)


# What becomes of it ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_images_come_to_be_named_as_asked_and_steps_only_help():
    """The cross-entropy of the teacher on what was asked for falls, in 40 steps to almost all named right."""
    network = learnt()
    labels = torch.arange(30) % CLASSES

    def named(steps: int) -> tuple[float, float]:
        ours = inversion(network, {"batch": 30, "g_steps": steps, "noise": 32, "lr_g": 0.01, "bn": 0.1, "oh": 1.0})
        with seeded(8):
            images = ours.batch(labels, False)
        assert 0 <= float(images.min()) <= float(images.max()) <= 1
        scores = network((images - ours.mean.detach()) / ours.std.detach())
        right = (scores.argmax(dim=1) == labels).double().mean()
        return float(torch.nn.functional.cross_entropy(scores, labels)), float(right)

    (loss, _), (later, right) = named(1), named(40)
    assert later < loss - 0.2
    assert right > 0.9


def test_of_all_steps_the_images_of_the_lowest_loss_are_taken(monkeypatch):
    ours, seen = inversion(knobs={"g_steps": 4}), []
    real = ours.loss
    offsets = iter([3.0, 1.0, -50.0, 2.0])

    def loss(images, labels, adversarial):
        seen.append(images.detach().clone())
        value, layers = real(images, labels, adversarial)
        return value + next(offsets), layers

    monkeypatch.setattr(ours, "loss", loss)
    with seeded(1):
        best = ours.batch(torch.arange(12) % CLASSES, False)
    assert torch.equal(best, seen[2])
    assert not torch.equal(best, seen[3])


def test_the_mean_and_deviation_of_pixels_learn_from_batch_to_batch():
    ours = inversion(knobs={"g_steps": 1})
    assert (ours.mean.flatten().tolist(), ours.std.flatten().tolist()) == ([0.5] * 3, pytest.approx([0.2] * 3))
    found = []
    with seeded(1):
        for _ in range(2):
            ours.batch(torch.arange(12) % CLASSES, False)
            found.append(torch.cat([ours.mean, ours.std]).detach().flatten())
    # Adam's first step is its step size, 0.01, whatever the gradient.
    torch.testing.assert_close(
        (found[0] - torch.tensor([0.5] * 3 + [0.2] * 3)).abs(), torch.full((6,), 0.01), rtol=1e-3, atol=0
    )
    assert not torch.equal(found[0], found[1])


def test_a_loss_that_is_never_finite_is_told(monkeypatch):
    ours = inversion()
    real = ours.loss
    monkeypatch.setattr(ours, "loss", lambda *given: (real(*given)[0] * torch.nan, []))
    with pytest.raises(UserError, match=r"method\.synthesis\.lr_g=0\.002: no image has a finite loss"):
        ours.batch(torch.arange(12) % CLASSES, False)


@pytest.mark.slow
def test_the_student_learns_what_the_teacher_says_and_the_teacher_stays():
    torch.manual_seed(0)
    network = teacher()
    before = copy.deepcopy(network.state_dict())
    ours = inversion(network, {"kd_steps": 30})
    new = copy.deepcopy(ours.student.state_dict())
    assert not torch.equal(new["mapping.weight"], before["mapping.weight"])
    images = (torch.rand(24, 3, SIDE, SIDE) * 255).to(torch.uint8)

    def apart() -> tuple[float, float]:
        shown = ours._standardise(images)
        ours.student.train()
        with torch.no_grad():
            said, wanted = (torch.softmax(n(shown), dim=1) for n in (ours.student, network))
            mapped, target = (n.mapping(n.body(shown)) for n in (ours.student, network))
        return float((said - wanted).abs().mean()), float((mapped - target).square().mean())

    first = apart()
    with seeded(2):
        ours.teach(images)
    last = apart()
    assert last[0] < 0.7 * first[0]
    assert last[1] < 0.7 * first[1]
    with seeded(2):
        ours.run()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(value.requires_grad for value in network.parameters())


@pytest.mark.parametrize("knobs", [{"kd_steps": 0}, {"adv": 0.0}], ids=str)
def test_nobody_teaches_a_student_that_is_not_asked(knobs):
    ours = inversion(knobs=knobs)
    before = copy.deepcopy(ours.student.state_dict())
    ours.teach(torch.zeros(6, 3, SIDE, SIDE, dtype=torch.uint8))
    assert all(torch.equal(value, before[name]) for name, value in ours.student.state_dict().items())


@pytest.mark.slow
def test_the_seed_makes_the_images():
    def made(seed: int) -> torch.Tensor:
        ours = inversion(augment="crop_flip")
        with seeded(seed):
            return ours.run()[0]

    assert torch.equal(made(1), made(1))
    assert not torch.equal(made(1), made(2))
