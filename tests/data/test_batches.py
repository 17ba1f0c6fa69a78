"""Mini-batches: their order, their augmentation, and what a network sees of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import interpolate, pad

from fcl_bench.data.images.batches import AUGMENTATIONS, Augment, Standardise, epoch_batches

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, shape, generator=seeded(seed), dtype=torch.uint8)


@settings(max_examples=200, deadline=None)
@given(n=st.integers(0, 200), batch_size=st.integers(1, 70), seed=st.integers(0, 9))
def test_an_epoch_has_every_sample_once_in_full_batches(n, batch_size, seed):
    batches = list(epoch_batches(n, batch_size, seeded(seed)))
    assert sorted(torch.cat(batches).tolist() if batches else []) == list(range(n))
    sizes = [len(batch) for batch in batches]
    assert all(size == batch_size for size in sizes[:-1])
    assert all(batch.dtype == torch.int64 for batch in batches)
    if n:
        assert 1 <= sizes[-1] <= batch_size + (len(sizes) > 0 and n > batch_size > 1)
    if n > 1 and batch_size > 1:
        assert min(sizes) > 1


def test_epochs_differ_and_follow_from_the_generator():
    first, second = seeded(), seeded()
    passes = [[torch.cat(list(epoch_batches(50, 8, generator))) for _ in range(2)] for generator in (first, second)]
    assert torch.equal(passes[0][0], passes[1][0])
    assert torch.equal(passes[0][1], passes[1][1])
    assert not torch.equal(passes[0][0], passes[0][1])


def all_crops(image: torch.Tensor, mirrored: bool) -> list[torch.Tensor]:
    """Every crop of one image (3, h, w) in zeros, in the order of top and left; then those of its mirror image."""
    height, width = image.shape[1:]
    down, across = height // 8, width // 8
    padded = pad(image, (across, across, down, down))
    versions = [padded, padded.flip(2)] if mirrored else [padded]
    return [
        version[:, top : top + height, left : left + width]
        for version in versions
        for top in range(2 * down + 1)
        for left in range(2 * across + 1)
    ]


@pytest.mark.parametrize("kind", ["crop", "crop_flip"])
@pytest.mark.parametrize("shape", [(8, 8), (16, 9), (5, 17), (4, 4)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_every_augmented_image_is_a_crop_of_its_own(kind, shape, layout):
    images = random_images(40, 3, *shape).contiguous(memory_format=layout)
    before = images.clone()
    augmented = Augment(kind)(images, seeded())
    assert torch.equal(images, before)
    assert augmented.shape == images.shape
    assert augmented.dtype == torch.uint8
    for image, got in zip(images, augmented, strict=True):
        assert any(torch.equal(got, crop) for crop in all_crops(image, kind == "crop_flip"))


@pytest.mark.slow_cases("crop_flip-50")
@pytest.mark.parametrize(("kind", "outcomes"), [("crop", 25), ("crop_flip", 50)])
def test_offsets_and_flips_are_uniform(kind, outcomes):
    image = random_images(1, 3, 16, 16)
    crops = torch.stack(all_crops(image[0], kind == "crop_flip"))
    assert len(crops) == outcomes
    draws = 200 * outcomes
    augmented = Augment(kind)(image.expand(draws, -1, -1, -1), seeded())
    counts = torch.tensor([int((augmented == crop).flatten(1).all(dim=1).sum()) for crop in crops])
    assert counts.sum() == draws
    chi_squared = float(((counts - 200.0) ** 2 / 200).sum())
    assert chi_squared < outcomes - 1 + 4 * (2 * (outcomes - 1)) ** 0.5


@pytest.mark.parametrize("kind", ["crop", "crop_flip"])
def test_draws_follow_from_the_generator_and_go_on(kind):
    images = random_images(64, 3, 32, 32)
    first, second = seeded(), seeded()
    passes = [[Augment(kind)(images, generator) for _ in range(2)] for generator in (first, second)]
    assert torch.equal(passes[0][0], passes[1][0])
    assert torch.equal(passes[0][1], passes[1][1])
    assert not torch.equal(passes[0][0], passes[0][1])


def test_none_leaves_images_and_generator_alone():
    generator, images = seeded(), random_images(4, 3, 8, 8)
    state = generator.get_state()
    assert Augment("none")(images, generator) is images
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("kind", AUGMENTATIONS)
def test_a_batch_of_none_and_of_one_can_be_augmented(kind):
    for n in (0, 1):
        assert Augment(kind)(random_images(n, 3, 16, 16), seeded()).shape == (n, 3, 16, 16)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_images_of_the_networks_size_are_scaled_and_standardised(layout):
    images = random_images(5, 3, 12, 12).contiguous(memory_format=layout)
    seen = Standardise(12, MEAN, STD)(images)
    plain = torch.stack([(images[:, c].float() / 255 - MEAN[c]) / STD[c] for c in range(3)], dim=1)
    assert torch.equal(seen, plain)
    assert seen.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("size", [5, 20, 33])
def test_images_of_another_size_are_resized_within_the_range_of_bytes(size):
    images = 255 * random_images(4, 3, 12, 12).bitwise_and(1)  # black and white: bicubic overshoots at edges
    seen = Standardise(size, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))(images)
    resized = interpolate(images.float(), (size, size), mode="bicubic", antialias=True)
    assert (resized.max() > 256) == (size > 12)
    torch.testing.assert_close(seen, resized.clamp(0, 255) / 255)
    assert seen.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(8, 8), (12, 9)])
def test_scaled_images_are_what_is_standardised(shape):
    """From 0 to 1, of the network's size; the bytes stay as they are."""
    standardise = Standardise(8, (0.5, 0.4, 0.3), (0.25, 0.5, 0.2))
    images = torch.randint(256, (5, 3, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before, scaled = images.clone(), standardise.scaled(images)
    assert scaled.shape == (5, 3, 8, 8)
    assert 0 <= scaled.min() < 0.1
    assert 0.9 < scaled.max() <= 1
    torch.testing.assert_close(standardise.pixels(scaled), standardise(images))
    assert torch.equal(images, before)


def test_of_an_oblong_the_network_sees_the_central_square():
    images = random_images(3, 3, 10, 16)
    standardise = Standardise(20, MEAN, STD)
    assert torch.equal(standardise(images), standardise(images[..., 3:13]))
    assert torch.equal(standardise(images.mT), standardise(images.mT[..., 3:13, :]))


def test_constants_made_under_inference_mode_can_be_trained_with():
    standardise, weights = Standardise(8, MEAN, STD), torch.nn.Conv2d(3, 1, 3)
    images = random_images(2, 3, 8, 8)
    with torch.inference_mode():
        standardise(images)
    weights(standardise(images)).sum().backward()
    assert weights.weight.grad is not None


@pytest.mark.gpu
def test_a_gpu_sees_the_crops_that_a_cpu_sees():
    images = random_images(64, 3, 32, 32)
    standardise = Standardise(32, MEAN, STD)
    for kind in AUGMENTATIONS:
        here, there = (Augment(kind)(batch, seeded()) for batch in (images, images.cuda()))
        assert torch.equal(here, there.cpu())
        torch.testing.assert_close(standardise(here), standardise(there).cpu())


@pytest.mark.parametrize("kind", [kind for kind in AUGMENTATIONS if not kind.endswith("brightness")])
def test_images_in_float_get_the_same_draws_and_their_pixels_gradients(kind):
    """The gradient of a weighted sum of what comes out is the weight of the place to which a pixel went, or 0."""
    images = random_images(5, 3, 16, 24)
    in_bytes = Augment(kind)(images, seeded(3))
    in_float = images.double().requires_grad_()
    augmented = Augment(kind)(in_float, seeded(3))
    assert torch.equal(augmented, in_bytes.double())
    weights = torch.rand(augmented.shape, dtype=torch.float64, generator=seeded(4))
    total = (augmented * weights).sum()
    total.backward()
    # Linear: so the sum is the inner product of pixels and gradients, and each pixel went to one place at most.
    assert float((in_float.grad * in_float).sum().detach()) == pytest.approx(float(total.detach()))
    assert set(in_float.grad.unique().tolist()) <= {0.0, *weights.unique().tolist()}


def test_brightness_is_a_factor_of_the_cropped_image_and_white_at_most():
    """Of each image one, within 1 +- 63/255, both ways; the crops and flips are those of `crop_flip`."""
    images = random_images(200, 3, 16, 16)
    moved = Augment("crop_flip")(images, seeded()).double()
    brightened = Augment("crop_flip_brightness")(images, seeded())
    assert brightened.dtype == torch.uint8
    factors = []
    for before, after in zip(moved, brightened.double(), strict=True):
        inside = (after > 0) & (after < 255)
        factor = float((before * after)[inside].sum() / (before * before)[inside].sum())
        factors.append(factor)
        assert torch.allclose((before * factor).clamp(0, 255), after, atol=0.51 + 255 * 2e-3)
    found = torch.tensor(factors)
    assert 1 - 63 / 255 - 1e-2 < found.min() < 0.78
    assert 1.22 < found.max() < 1 + 63 / 255 + 1e-2
    scaled = Augment("crop_flip_brightness")(images / 255, seeded())
    assert torch.allclose(scaled * 255, brightened.float(), atol=0.51)
