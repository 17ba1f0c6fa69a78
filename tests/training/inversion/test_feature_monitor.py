"""LGA's radius against one machine that has all samples, and its augmented features against what they promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.methods.exemplars.lga import SENT, augmented_features, radius_of
from fcl_bench.methods.gradient.ccvr import moments_message

COLUMNS = (2, 3, 7)


def features_of(n: int = 60, d: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    labels = rng.choice(COLUMNS, n)
    return torch.from_numpy(rng.standard_normal((n, d)) * (1 + labels[:, None]) + labels[:, None]), torch.from_numpy(
        labels
    )


def class_statistics(features: torch.Tensor, labels: torch.Tensor, columns: tuple[int, ...]) -> list[torch.Tensor]:
    """What a client sends."""
    sent = moments_message(features.double(), labels, columns, SENT)
    return [sent[name] for name in ("counts", "sums", "squares")]


def central_radius(features: np.ndarray, labels: np.ndarray) -> float:
    """As LGA's server computes it of everybody's images: np.cov, its trace, a mean, a root."""
    means = [np.trace(np.cov(features[labels == c].T)) / features.shape[1] for c in np.unique(labels)]
    return float(np.sqrt(np.mean(means)))


# The radius -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 4, 60])
def test_the_radius_follows_from_the_clients_sums(clients):
    """However the samples lie on clients, one sample on each included."""
    features, labels = features_of()
    parts = [class_statistics(z, y, COLUMNS) for z, y in zip(features.chunk(clients), labels.chunk(clients))]  # noqa: B905
    counts, sums, squares = (sum(kind) for kind in zip(*parts, strict=True))
    assert counts.tolist() == torch.bincount(labels)[list(COLUMNS)].tolist()
    assert radius_of(counts, sums, squares) == pytest.approx(central_radius(features.numpy(), labels.numpy()), 1e-12)


def test_the_radius_by_hand():
    """Class a: (0, 0), (2, 0): variances 2, 0, mean 1. Class b: (1, 1), (1, 7): 0, 18, mean 9. sqrt(5)."""
    features, labels = torch.tensor([[0.0, 0], [2, 0], [1, 1], [1, 7], [50, 3]]), torch.tensor([2, 2, 3, 3, 7])
    assert radius_of(*class_statistics(features, labels, COLUMNS)) == pytest.approx(5**0.5)


def test_without_a_class_of_two_samples_there_is_no_radius():
    features, labels = features_of(2)
    assert radius_of(*class_statistics(features[:1], labels[:1], COLUMNS)) == 0
    assert radius_of(*class_statistics(features[:0], labels[:0], COLUMNS)) == 0


# The features ---------------------------------------------------------------------------------------------------------


def noise_of(features, labels, radius, seed=0):
    made, theirs = augmented_features(features, labels, radius, seed)
    assert torch.equal(theirs, labels.repeat_interleave(5))
    return made - features.repeat_interleave(5, dim=0)


def limits(features, labels) -> dict[int, float]:
    found = {}
    for c in labels.unique().tolist():
        variances = np.var(features[labels == c].numpy(), axis=0, ddof=1)
        found[c] = 0.1 * float(variances.sum())
    return found


@pytest.mark.parametrize("radius", [0.01, 0.2, 5.0])
def test_no_noise_is_longer_than_the_limit(radius):
    features, labels = features_of(d=20)
    noise = noise_of(features, labels, radius)
    bound = limits(features, labels)
    longest = torch.tensor([bound[c] for c in labels.tolist()], dtype=torch.float64).repeat_interleave(5)
    assert bool((noise.square().sum(dim=1) <= longest * (1 + 1e-9)).all())
    assert bool((noise != 0).any())


def test_short_noise_has_the_promised_deviation():
    """Far below the limit nothing is drawn again: noise / radius is normal with the class's variances."""
    features, labels = features_of(3000, 4)
    noise = noise_of(features, labels, 0.01) / 0.01
    for c in labels.unique().tolist():
        wanted = np.std(features[labels == c].numpy(), axis=0, ddof=1)
        own = noise[(labels == c).repeat_interleave(5)].numpy()
        np.testing.assert_allclose(own.std(axis=0), wanted, rtol=0.06)
        np.testing.assert_allclose(own.mean(axis=0) / wanted, 0, atol=0.06)


def test_noise_that_was_drawn_again_is_the_normal_one_cut_off():
    """In one dimension with variance v: |noise| <= sqrt(.1 v), uniform where the radius is far larger."""
    features = torch.from_numpy(np.random.default_rng(0).standard_normal((4000, 1)))
    labels = torch.zeros(4000, dtype=torch.int64)
    noise = noise_of(features, labels, radius=1.0)[:, 0].numpy() / np.sqrt(0.1 * features.var().item())
    # Density of a normal cut off at .316 deviations: nearly flat; what ten draws missed lies at the limit.
    inside = noise[np.abs(noise) < 1 - 1e-9]
    assert len(inside) / len(noise) > 0.5
    assert np.var(inside) == pytest.approx(1 / 3, rel=0.05)
    at_limit = 1 - len(inside) / len(noise)
    assert at_limit == pytest.approx((1 - 0.2482) ** 10, abs=0.01)


def test_in_many_dimensions_it_ends_at_the_limit():
    """The published code would draw for ever: the chance of a draw is below 1e-20."""
    features, labels = features_of(40, 300)
    noise = noise_of(features, labels, radius=1.0)
    bound = torch.tensor([limits(features, labels)[c] for c in labels.tolist()], dtype=torch.float64)
    bound = bound.repeat_interleave(5)
    torch.testing.assert_close(noise.square().sum(dim=1), bound)


def test_the_seed_decides_and_no_radius_means_no_noise():
    features, labels = features_of()
    assert torch.equal(noise_of(features, labels, 0.1, 3), noise_of(features, labels, 0.1, 3))
    assert not torch.equal(noise_of(features, labels, 0.1, 3), noise_of(features, labels, 0.1, 4))
    assert not bool(noise_of(features, labels, 0.0).any())


def test_a_single_image_of_a_class_has_no_variance():
    features, labels = features_of(1)
    assert not bool(noise_of(features, labels, 0.5).any())
    assert augmented_features(features.float(), labels, 0.1, 0)[0].dtype == torch.float32
