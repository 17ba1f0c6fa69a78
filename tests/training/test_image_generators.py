"""The generator of images, students, and synthetic samples for clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import batch_norm, conv2d, leaky_relu

from fcl_bench.data.images.batches import Augment, Standardise
from fcl_bench.methods.data_free.generators.images import (
    ImageGenerator,
    ImagePool,
    agreement,
    reinitialised,
    to_bytes,
)
from fcl_bench.training.network import Network
from tests.methods.training_harness import tiny_context

STANDARDISE = Standardise(8, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))


def made(inputs: int = 5, size: int = 8, output: str = "sigmoid", seed: int = 0, **options) -> ImageGenerator:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ImageGenerator(inputs, size, output, **options)


def numbers(module: torch.nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())


# The generator --------------------------------------------------------------------------------------------------------


def test_the_published_sizes():
    """TARGET's (z of 256) and MFCL's (z of 1,000) generators of 32 x 32 pixels."""
    assert numbers(ImageGenerator(256, 32)) == 2_328_899
    assert numbers(ImageGenerator(1000, 32, "tanh", eps=0.8)) == 8_423_939


@pytest.mark.parametrize("output", ["sigmoid", "tanh"])
@pytest.mark.parametrize("training", [True, False])
def test_images_are_those_of_the_layers_written_down(output, training):
    generator = made(size=12, output=output, eps=0.8).double().train(training)
    with torch.no_grad():
        for name, value in generator.state().items():
            if "norm" in name:  # nothing stays at 0 or 1, where a mistake would not show
                value.copy_(torch.rand_like(value) + 0.5)
    w = {name: value.clone() for name, value in generator.state().items()}
    z = torch.randn(6, 5, dtype=torch.float64)

    def normal(x, name, eps):
        kept = w[f"{name}.running_mean"], w[f"{name}.running_var"]
        return batch_norm(x, *(k.clone() for k in kept), w[f"{name}.weight"], w[f"{name}.bias"], training, eps=eps)

    def doubled(x):
        return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)

    x = normal((z @ w["first.weight"].T + w["first.bias"]).reshape(6, 128, 3, 3), "first_norm", 1e-5)
    x = conv2d(doubled(x), w["second.weight"], w.get("second.bias"), padding=1)
    x = leaky_relu(normal(x, "second_norm", 0.8), 0.2)
    x = conv2d(doubled(x), w["third.weight"], w.get("third.bias"), padding=1)
    x = conv2d(leaky_relu(normal(x, "third_norm", 0.8), 0.2), w["last.weight"], w["last.bias"], padding=1)
    if output == "sigmoid":
        expected = 1 / (1 + torch.exp(-x))
    else:
        x = torch.tanh(x)
        mean, variance = w["output.1.running_mean"], w["output.1.running_var"]
        if training:
            mean, variance = x.mean(dim=(0, 2, 3)), x.var(dim=(0, 2, 3), correction=0)
        expected = (x - mean[:, None, None]) / (variance[:, None, None] + 1e-5) ** 0.5
    torch.testing.assert_close(generator(z).detach(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [3, 8, 10, 13, 32])
def test_every_size_has_pixels_from_0_to_1(size):
    generator = made(size=size)
    with torch.no_grad():
        images = generator(100 * generator.noise(4))
    assert images.shape == (4, 3, size, size)
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    assert to_bytes(images).dtype == torch.uint8


def test_standardised_images_have_mean_0_and_variance_1():
    images = made(output="tanh")(torch.randn(16, 5)).detach()
    np.testing.assert_allclose(images.mean(dim=(0, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(images.var(dim=(0, 2, 3), correction=0), 1, atol=1e-2)


def test_bytes_are_the_nearest():
    assert to_bytes(torch.tensor([-0.1, 0.0, 0.4999, 1.0, 1.2]) / 1.0).tolist() == [0, 0, 127, 255, 255]


def test_what_was_sent_is_the_generator():
    first, second = made(seed=0), made(seed=1)
    z = torch.randn(7, 5)
    first(z)  # running statistics move
    assert not torch.equal(first.eval()(z), second.eval()(z))
    second.load({name: value.clone() for name, value in first.state().items()})
    assert torch.equal(first(z), second(z))
    assert sum(value.numel() for value in first.state().values()) == numbers(first) + 2 * (128 + 128 + 64)


def test_noise_follows_from_its_generator_and_is_standard_normal():
    generator = made(inputs=50)
    draws = [generator.noise(400, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*draws)
    assert abs(float(draws[0].mean())) < 0.03
    assert abs(float(draws[0].std()) - 1) < 0.03


# The student ----------------------------------------------------------------------------------------------------------


def teacher(seed: int = 0) -> Network:
    network = Network(tiny_context(seed=seed).network)
    network.grow([3, 2], seed)
    network.train()
    with torch.no_grad():
        network.body(torch.randn(8, 3, 8, 8))  # running statistics of its own
    return network.eval().requires_grad_(False)


def test_a_student_has_the_form_and_nothing_else_of_its_teacher():
    network = teacher()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        student = reinitialised(network)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not network.training
    assert not any(value.requires_grad for value in network.parameters())
    assert student.training
    assert all(value.requires_grad for value in student.parameters())
    theirs = student.state_dict()
    assert theirs.keys() == before.keys()
    for name, value in theirs.items():
        assert value.shape == before[name].shape
        if value.dim() > 1 or "running" in name or name.startswith("heads"):
            assert not torch.equal(value, before[name]), name
    assert all(bool((value == 0).all()) for name, value in theirs.items() if name.endswith("running_mean"))
    assert all(bool((value == 1).all()) for name, value in theirs.items() if name.endswith("running_var"))


def test_what_never_trains_does_not_train_in_a_student_either():
    network = teacher()
    network.never_trains = {"body.stage1.0.weight"}
    student = reinitialised(network)
    assert {name for name, value in student.named_parameters() if not value.requires_grad} == network.never_trains


def test_a_students_weights_follow_from_torchs_generator():
    found = []
    for seed in (1, 1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            found.append(reinitialised(teacher()).state()["heads.1.weight"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("T", [1.0, 2.0, 20.0])
def test_agreement_is_the_divergence_times_the_squared_temperature(T):
    rng = np.random.default_rng(0)
    said, wanted = rng.standard_normal((2, 6, 4)) * 3

    def softmax(scores):
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    p, q = softmax(wanted / T), softmax(said / T)
    expected = T**2 * (p * np.log(p / q)).sum(axis=1)
    scores = torch.from_numpy(said).requires_grad_()
    found = agreement(scores, torch.from_numpy(wanted), T)
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-10)
    found.sum().backward()
    np.testing.assert_allclose(scores.grad.numpy(), T * (q - p), atol=1e-10)
    assert agreement(scores, scores.detach(), T).abs().max() < 1e-12


# Synthetic samples ----------------------------------------------------------------------------------------------------


def numbered(count: int) -> torch.Tensor:
    """Images whose bytes are their numbers."""
    return torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 8, 8).contiguous()


def numbers_of(images: torch.Tensor) -> list[int]:
    """The numbers of such images, as the network sees them."""
    return (images[:, 0, 0, 0] * 0.2 + 0.5).mul(255).round().long().tolist()


def pool(count: int = 7, seed: int = 0, augment: str = "none") -> ImagePool:
    return ImagePool(numbered(count), seed, Augment(augment), STANDARDISE)


@pytest.mark.parametrize("size", [1, 3, 7, 10, 30])
def test_a_pool_goes_round_in_shuffled_passes_whatever_the_batches_are(size):
    source, drawn = pool(), []
    while len(drawn) < 7 * 12:
        images = source.next(size)
        assert len(images) == size
        drawn += numbers_of(images)
    passes = [tuple(drawn[begin : begin + 7]) for begin in range(0, 7 * 12, 7)]
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert len(set(passes)) > 8


def test_pools_images_are_what_the_network_sees_of_bytes():
    images = pool().next(7)
    torch.testing.assert_close(images, STANDARDISE(numbered(7))[numbers_of(images)], rtol=0, atol=0)


def test_synthetic_samples_have_a_random_stream_of_their_own():
    def source(seed):
        drawn = pool(50, seed, "crop_flip")
        return lambda: drawn.next(9)

    torch.manual_seed(0)
    state = torch.get_rng_state()
    first, second, other = source(4), source(4), source(5)
    torch.set_rng_state(state)
    theirs = [first() for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert all(torch.equal(batch, second()) for batch in theirs)
    assert not torch.equal(theirs[0], theirs[1])
    assert not torch.equal(theirs[0], other())


def test_pixels_and_bytes_are_standardised_alike():
    images = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(STANDARDISE.pixels(images / 255), STANDARDISE(images))
