"""The encoder, its gradients against loops in NumPy and autograd, and the labels that they give away."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.methods.exemplars.inversion import GradientEncoder, default_strides


def samples(count: int, classes: int, side: int = 8, seed: int = 0, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    images = torch.from_numpy(rng.random((count, 3, side, side))).to(dtype)
    return images, torch.from_numpy(rng.integers(0, classes, count))


def weights_of(encoder: GradientEncoder) -> list[np.ndarray]:
    return [weight.double().numpy() for weight in encoder._weights]


def sigmoid(a: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-a))


def plain_scores(weights: list[np.ndarray], strides, image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits and features of one image, convolution by loops over output pixels."""
    for layer, stride in enumerate(strides):
        kernel, bias = weights[2 * layer], weights[2 * layer + 1]
        padded = np.pad(image, ((0, 0), (2, 2), (2, 2)))
        height, width = ((side - 1) // stride + 1 for side in image.shape[1:])
        out = np.empty((len(kernel), height, width))
        for i in range(height):
            for j in range(width):
                patch = padded[:, i * stride : i * stride + 5, j * stride : j * stride + 5]
                out[:, i, j] = (kernel * patch).sum(axis=(1, 2, 3)) + bias
        image = sigmoid(out)
    features = image.reshape(-1)
    return weights[-2] @ features + weights[-1], features


def plain_loss(weights: list[np.ndarray], strides, image: np.ndarray, label: int) -> float:
    scores, _ = plain_scores(weights, strides, image)
    return float(np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[label])


def test_its_size_is_that_of_the_paper():
    """3 convolutions of 12 filters 5 x 5: 912 + 3,612 + 3,612 numbers, and 769 for each class."""
    assert GradientEncoder((32, 32), 100, 0).numbers == 85_036
    assert GradientEncoder((32, 32), 100, 0).features == 768
    assert GradientEncoder((32, 32), 7, 0).numbers == 8_136 + 769 * 7
    assert default_strides(32) == (2, 2, 1)
    # 64 pixels with a first stride of 4 leave 8 x 8 too, as in LGA's code for Tiny-ImageNet.
    assert GradientEncoder((64, 64), 3, 0).features == 768
    assert GradientEncoder((8, 8), 3, 0).features == 12 * 2 * 2
    assert GradientEncoder((28, 20), 3, 0).features == 12 * 7 * 5


def test_weights_are_uniform_and_of_the_seed():
    one, same, other = (torch.cat([w.flatten() for w in GradientEncoder((32, 32), 100, s)._weights]) for s in (4, 4, 5))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert -0.5 <= float(one.min()) < -0.49
    assert 0.49 < float(one.max()) <= 0.5
    assert float(one.mean()) == pytest.approx(0, abs=0.005)
    assert float(one.std()) == pytest.approx(12**-0.5, abs=0.005)


def test_a_new_class_leaves_all_weights_as_they_are():
    small, large = GradientEncoder((8, 8), 3, 1), GradientEncoder((8, 8), 5, 1)
    assert all(torch.equal(a, b) for a, b in zip(small._weights[:-2], large._weights[:-2], strict=True))
    assert all(torch.equal(a, b[:3]) for a, b in zip(small._weights[-2:], large._weights[-2:], strict=True))


@pytest.mark.parametrize("strides", [(2, 2, 1), (2, 1)])
def test_scores_are_those_of_plain_loops(strides):
    encoder = GradientEncoder((8, 6), 4, 2, strides, torch.float64)
    images = torch.from_numpy(np.random.default_rng(0).random((3, 3, 8, 6)))
    wanted = [plain_scores(weights_of(encoder), strides, image.numpy())[0] for image in images]
    np.testing.assert_allclose(encoder.scores(images).numpy(), np.stack(wanted), rtol=1e-12)


def test_gradients_are_finite_differences():
    """Every 101st number of a sample's gradient, by central differences of the loops above."""
    strides = (2, 1)
    encoder = GradientEncoder((6, 6), 3, 3, strides, torch.float64)
    images, labels = samples(2, 3, side=6)
    found = encoder.gradients(images, labels).numpy()
    weights, step = weights_of(encoder), 1e-5
    sizes = np.cumsum([0] + [weight.size for weight in weights])
    assert found.shape == (2, sizes[-1])
    for number in range(0, sizes[-1], 101):
        part = int(np.searchsorted(sizes, number, side="right")) - 1
        place = np.unravel_index(number - sizes[part], weights[part].shape)
        for sample in range(2):
            both = []
            for sign in (1, -1):
                moved = [weight.copy() for weight in weights]
                moved[part][place] += sign * step
                both.append(plain_loss(moved, strides, images[sample].numpy(), int(labels[sample])))
            assert found[sample, number] == pytest.approx((both[0] - both[1]) / (2 * step), abs=1e-8)


def test_gradients_of_many_samples_are_each_ones_own():
    encoder = GradientEncoder((8, 8), 5, 0, dtype=torch.float64)
    images, labels = samples(4, 5)
    alone = torch.cat([encoder.gradients(images[i : i + 1], labels[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(encoder.gradients(images, labels), alone, rtol=1e-12, atol=1e-14)
    assert encoder.gradients(images[:0], labels[:0]).shape == (0, encoder.numbers)


def test_factors_are_the_gradients_in_fewer_numbers():
    encoder = GradientEncoder((8, 8), 5, 0, dtype=torch.float64)
    (images, labels), (others, theirs) = samples(4, 5), samples(4, 5, seed=1)
    whole, other = encoder.gradients(images, labels), encoder.gradients(others, theirs)
    factors = encoder.factorised(whole)
    for name in ("convolutions", "slopes", "features"):
        wanted = getattr(encoder.factors(images, labels), name)
        torch.testing.assert_close(getattr(factors, name), wanted, rtol=1e-12, atol=1e-14)
    distances = factors.distances(encoder.factorised(other))
    torch.testing.assert_close(distances, (whole - other).square().sum(dim=1), rtol=1e-12, atol=0)
    assert not bool(encoder.factorised(torch.zeros_like(whole)).features.any())
    faint = encoder.factorised((1e-25 * whole).float())
    torch.testing.assert_close(faint.features, factors.features.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("classes", [1, 2, 3, 10, 100, 345])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_labels_are_read_off_exactly(classes, dtype):
    encoder = GradientEncoder((8, 8), classes, classes, dtype=dtype)
    images, labels = samples(60, classes, seed=classes, dtype=dtype)
    # Far outside 0..1 too: a sigmoid is positive wherever it is taken.
    images[30:] = 6 * images[30:] - 3
    assert torch.equal(encoder.labels(encoder.gradients(images, labels)), labels)


def test_labels_at_the_papers_size():
    encoder = GradientEncoder((32, 32), 100, 0)
    images, labels = samples(100, 100, side=32, dtype=torch.float32)
    assert torch.equal(encoder.labels(encoder.gradients(images, labels)), labels)


def test_a_sample_without_a_gradient_gives_nothing_away():
    """With one class the loss is 0 whatever the image; its label is the only one there is."""
    encoder = GradientEncoder((8, 8), 1, 0)
    images, labels = samples(2, 1, dtype=torch.float32)
    gradients = encoder.gradients(images, labels)
    assert not bool(gradients.any())
    assert encoder.labels(gradients).tolist() == [0, 0]
