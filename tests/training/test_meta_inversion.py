"""TARGET's making of images: against a plain version in float64, its limits, and what it is for."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from fcl_bench.data.images.batches import Augment, Standardise
from fcl_bench.errors import UserError
from fcl_bench.methods.data_free.generators.images import ImageGenerator, agreement
from fcl_bench.methods.data_free.target import MetaInversion, Synthesis
from fcl_bench.training.network import Network
from fcl_bench.typed import typed_instance
from tests.methods.training_harness import image_tasks, tiny_context
from tests.training.meta_inversion_oracle import PlainInversion

CLASSES = 3
STANDARDISE = Standardise(8, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def knobs(**own) -> Synthesis:
    small = {"batch": 12, "warmup": 1, "noise": 6, "g_steps": 3, "kd_steps": 4, "lr_student": 0.05, "temperature": 4.0}
    return Synthesis(**{**small, **own})


@pytest.fixture(scope="module")
def trained() -> Network:
    """A network that knows three classes of made-up images."""
    [[(images, labels)]] = image_tasks(np.random.default_rng(0), [CLASSES], [[90]])
    network = Network(tiny_context(width=8).network)
    network.grow([CLASSES], 0)
    network.train()
    optimiser = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(40):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(network(STANDARDISE(images)), labels).backward()
        optimiser.step()
    optimiser.zero_grad()
    network.eval().requires_grad_(False)
    assert (network(STANDARDISE(images)).argmax(dim=1) == labels).all()
    return network


def inversion(network: Network, augment: str = "none", seed: int = 0, **own) -> MetaInversion:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MetaInversion(knobs(**own), network, 8, STANDARDISE, Augment(augment), nullcontext)


def run(made: MetaInversion, count: int, keeps_warmup: bool = False, seed: int = 1):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return made.run(count, CLASSES, keeps_warmup)


# Against the equations ------------------------------------------------------------------------------------------------


@pytest.mark.slow_cases("maml", "reptile")
@pytest.mark.parametrize("meta", ["maml", "reptile"])
def test_batches_and_the_generator_are_those_of_a_plain_version(meta, trained, monkeypatch):
    """Three batches in float64, the last two with a student; images and G's parameters after each."""
    network = copy.deepcopy(trained).double()
    # So large that the student's part is no rounding error.
    ours = inversion(network, meta=meta, g_steps=4, adv=30.0, lr_g=0.001)
    ours.generator.double()
    ours.student.double()
    # Only weights that have nothing to do with the network's are asked whether they agree with it.
    ours.student.heads[0].load_state_dict(network.heads[0].state_dict())
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
    plain = PlainInversion(
        knobs(meta=meta, g_steps=4, adv=30.0, lr_g=0.001), ours.generator, network, ours.student, STANDARDISE.pixels
    )
    draws, parts = torch.Generator().manual_seed(7), []
    for number in range(3):
        noise = torch.randn((12, 6), generator=draws, dtype=torch.float64)
        labels = torch.randint(CLASSES, (12,), generator=draws)
        monkeypatch.setattr(ImageGenerator, "noise", lambda *_, noise=noise: noise.clone())
        theirs = plain.batch(noise, labels, number > 0)
        torch.testing.assert_close(ours.batch(labels, number > 0), theirs, rtol=0, atol=1e-6)
        for (name, own), value in zip(ours.generator.named_parameters(), plain.generator.parameters(), strict=True):
            torch.testing.assert_close(own.detach(), value.detach(), rtol=0, atol=1e-6, msg=name)
        parts.append(float((plain.loss(theirs, labels, True)[0] - plain.loss(theirs, labels, False)[0]).detach()))
    assert all(abs(part) > 1e-3 for part in parts)


def test_the_students_steps_are_those_of_sgd_by_hand(trained, monkeypatch):
    """One lesson of three steps on a pool of one batch, decay 1e-4; a second with a smaller rate."""
    ours = inversion(trained, kd_steps=3, batch=16, lr_student=0.1, temperature=4.0)
    plain = copy.deepcopy(ours.student).train()
    images = torch.randint(256, (16, 3, 8, 8), dtype=torch.uint8)
    velocity: dict[str, torch.Tensor] = {}
    for lesson in range(2):
        monkeypatch.setattr(torch, "randperm", lambda n, generator=None: torch.arange(n))
        ours.teach(images)
        monkeypatch.undo()
        rate = 0.1 * (1 + np.cos(np.pi * lesson / 200)) / 2
        for _ in range(3):
            shown = STANDARDISE(images)
            loss = agreement(plain(shown), trained(shown), 4.0).mean()
            gradients = torch.autograd.grad(loss, list(plain.parameters()))
            for (name, value), gradient in zip(plain.named_parameters(), gradients, strict=True):
                gradient = gradient + 1e-4 * value.data
                velocity[name] = 0.9 * velocity[name] + gradient if name in velocity else gradient
                value.data -= rate * velocity[name]
        for (name, own), value in zip(ours.student.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, value, rtol=1e-4, atol=1e-5, msg=name)


# How much is made, and of what ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "warmup", "keeps", "batches", "taught"),
    [(30, 2, False, 5, 3), (24, 0, False, 2, 2), (30, 2, True, 3, 1), (24, 5, True, 2, 0), (1, 1, False, 2, 1)],
)
def test_warm_up_batches_come_before_or_count(count, warmup, keeps, batches, taught, trained, monkeypatch):
    """In batches of 12. The student plays a part from `warmup` on, and learns from what is kept."""
    made = inversion(trained, warmup=warmup)
    adversarial, lessons = [], []

    def batch(labels, with_student):
        adversarial.append(with_student)
        return torch.full((12, 3, 8, 8), len(adversarial) / 255)

    monkeypatch.setattr(made, "batch", batch)
    monkeypatch.setattr(made, "teach", lambda images: lessons.append(len(images)))
    images, labels = run(made, count, keeps)
    assert adversarial == [number >= warmup for number in range(batches)]
    first = 0 if keeps else warmup
    assert len(lessons) == taught
    assert lessons == [12 * (number + 1 - first) for number in range(batches) if number >= warmup]
    assert images.shape == (count, 3, 8, 8)
    assert images.dtype == torch.uint8
    assert images[:, 0, 0, 0].tolist() == [first + 1 + number // 12 for number in range(count)]
    assert labels.shape == (count,)
    assert set(labels.tolist()) <= {0, 1, 2}


def test_classes_are_asked_for_alike(trained, monkeypatch):
    made = inversion(trained, batch=3000, warmup=0, adv=0.0)
    monkeypatch.setattr(made, "batch", lambda labels, _: torch.zeros(3000, 3, 8, 8))
    _, labels = run(made, 3000)
    assert (labels.bincount(minlength=CLASSES) - 1000).abs().max() < 130  # five standard deviations


# Limits ---------------------------------------------------------------------------------------------------------------


def test_without_the_adversarial_term_there_is_no_student(trained, monkeypatch):
    """The student's weights stay, and nothing that it does is drawn."""
    made = inversion(trained, adv=0.0)
    monkeypatch.setattr(made, "teach", None)
    before = copy.deepcopy(made.student.state_dict())
    run(made, 24)
    assert all(torch.equal(value, before[name]) for name, value in made.student.state_dict().items())


@pytest.mark.slow_cases("bn", "oh")
@pytest.mark.parametrize("weight", ["bn", "oh", "adv"])
def test_every_term_counts(weight, trained):
    whole, without = (run(inversion(trained, **own), 24)[0] for own in ({}, {weight: 0.0}))
    assert not torch.equal(whole, without)


@pytest.mark.parametrize("meta", ["maml", "reptile"])
@pytest.mark.parametrize("adv", [1.0, 0.0])
def test_without_any_term_images_stay_as_they_are_made(adv, meta, trained):
    """In batches before the student plays its part, the loss had no gradient to go back."""
    made = inversion(trained, bn=0.0, oh=0.0, adv=adv, meta=meta)
    before = copy.deepcopy(made.generator.state_dict())
    images, _ = run(made, 24)
    assert images.float().std() > 1
    changed = [name for name, value in made.generator.named_parameters() if not torch.equal(value, before[name])]
    assert bool(changed) == (adv > 0)


def test_a_term_without_weight_is_not_even_looked_at(trained, monkeypatch):
    made = inversion(trained, bn=0.0, adv=0.0)
    monkeypatch.setattr(made, "_distance", None)
    images = made.generator(made.generator.noise(12)).detach()
    loss, _ = made.loss(images, torch.zeros(12, dtype=torch.int64), False)
    plain = torch.nn.functional.cross_entropy(trained(STANDARDISE.pixels(images)), torch.zeros(12, dtype=torch.int64))
    assert float(loss) == pytest.approx(0.5 * float(plain), rel=1e-5)


def test_the_network_stays_as_it_is(trained):
    before = copy.deepcopy(trained.state_dict())
    run(inversion(trained), 24)
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())
    assert not trained.training
    assert all(value.grad is None for value in trained.parameters())


@pytest.mark.slow_cases("maml", "reptile")
@pytest.mark.parametrize("meta", ["maml", "reptile"])
def test_images_follow_from_the_seed_alone(meta, trained):
    first, again, other = (run(inversion(trained, "crop_flip", meta=meta), 30, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_not_finite_is_the_users_to_mend(trained):
    with pytest.raises(UserError, match=r"lr_student=1e\+08: the student diverged \(a smaller method.synthesis.lr_stu"):
        run(inversion(trained, lr_student=1e8, kd_steps=20), 24)
    network = copy.deepcopy(trained)
    with torch.no_grad():
        network.heads[0].bias.fill_(torch.nan)
    with pytest.raises(UserError, match=r"method.synthesis.lr_g=0.002: no image has a finite loss"):
        run(inversion(network, adv=0.0), 12)


# What it is for -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_after_50_steps_the_network_takes_images_for_what_was_asked_for(trained):
    """More than 90 % are right; after a single step, from a fresh generator, they are not."""
    right = {}
    for steps in (1, 50):
        made = inversion(trained, g_steps=steps, bn=0.1, oh=1.0, adv=0.0, batch=64, warmup=0)
        images, labels = run(made, 64)
        right[steps] = float((trained(STANDARDISE(images)).argmax(dim=1) == labels).double().mean())
    assert right[50] > 0.9
    assert right[1] < 0.7


@pytest.mark.slow
def test_batches_start_better_as_the_generator_learns(trained):
    """The loss of the first step of a batch falls over batches: what MAML and Reptile are for."""
    for meta in ("maml", "reptile"):
        made, losses = inversion(trained, meta=meta, adv=0.0, batch=32, bn=1.0, oh=1.0), []
        original = made.loss
        made.loss = lambda *given, seen=losses, loss=original: (seen.append(loss(*given)), seen[-1])[1]
        run(made, 32 * 9)
        starts = [float(loss[0].detach()) for loss in losses[::3]]
        assert np.mean(starts[-3:]) < 0.8 * np.mean(starts[:2])


@pytest.mark.slow
def test_a_student_comes_to_agree(trained):
    torch.manual_seed(0)
    made = inversion(trained, kd_steps=40)
    images = torch.randint(256, (60, 3, 8, 8), dtype=torch.uint8)
    shown, apart = STANDARDISE(images), []
    for _ in range(2):
        with torch.no_grad():
            apart.append(float(agreement(made.student.eval()(shown), trained(shown), 4.0).mean()))
        made.teach(images)
    assert apart[1] < 0.5 * apart[0]


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: -1} for name in ("images", "warmup", "bn", "oh", "adv", "kd_steps")),
        *({name: 0} for name in ("noise", "g_steps", "lr_g", "lr_z", "lr_student", "temperature")),
        {"batch": 1},
        {"meta": "sgd"},
    ],
    ids=str,
)
def test_wrong_knobs_name_the_key(wrong):
    with pytest.raises(UserError, match=rf"method\.synthesis\.{next(iter(wrong))}"):
        typed_instance(Synthesis, wrong, "method.synthesis")
