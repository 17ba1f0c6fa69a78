"""Prototypes and their perturbation against loops over samples, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.methods.exemplars.proxy import nearest_to_means, perturbed

# Prototypes -----------------------------------------------------------------------------------------------------------


def plain_prototypes(features: np.ndarray, labels: np.ndarray) -> dict[int, int]:
    found = {}
    for column in sorted(set(labels.tolist())):
        places = [i for i, label in enumerate(labels) if label == column]
        directions = {i: features[i] / max(np.sqrt((features[i] ** 2).sum()), 1e-12) for i in places}
        mean = sum(directions.values()) / len(places)
        found[column] = min(places, key=lambda i: (((directions[i] - mean) ** 2).sum(), i))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_prototypes_are_those_of_plain_loops(seed):
    rng = np.random.default_rng(seed)
    features, labels = rng.standard_normal((40, 6)) + 0.5, rng.choice([0, 3, 4, 9], 40)
    columns, places = nearest_to_means(torch.from_numpy(features), torch.from_numpy(labels))
    assert dict(zip(columns.tolist(), places.tolist(), strict=True)) == plain_prototypes(features, labels)
    assert columns.tolist() == sorted(columns.tolist())


def test_directions_count_and_not_lengths():
    """Directions (1, 0), (0, 1), (.6, .8): mean (.5333, .6), nearest the third, however long the vectors are."""
    features = torch.tensor([[5.0, 0.0], [0.0, 1.0], [300.0, 400.0], [1.0, 0.0]])
    columns, places = nearest_to_means(features, torch.tensor([2, 2, 2, 7]))
    assert (columns.tolist(), places.tolist()) == ([2, 7], [2, 3])


def test_ties_go_to_the_lower_index_and_nothing_has_no_prototype():
    columns, places = nearest_to_means(torch.ones(4, 3), torch.tensor([1, 0, 1, 0]))
    assert (columns.tolist(), places.tolist()) == ([0, 1], [1, 0])
    columns, places = nearest_to_means(torch.ones(0, 3), torch.zeros(0, dtype=torch.int64))
    assert len(columns) == len(places) == 0


# Perturbation ---------------------------------------------------------------------------------------------------------

WEIGHT = torch.from_numpy(np.random.default_rng(1).standard_normal((4, 12)))


def linear_scores(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1) @ WEIGHT.to(images).T


def inputs(count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.from_numpy(np.random.default_rng(2).random((count, 3, 2, 2)))
    return images, torch.nn.functional.one_hot(torch.arange(count) % 4, 4).double()


def test_steps_are_those_of_torchs_sgd_on_each_image_alone():
    images, targets = inputs()
    found = perturbed(images, targets, linear_scores, steps=7, rate=0.3, weight_decay=0.01)
    for image, target, got in zip(images, targets, found, strict=True):
        x = image[None].clone().requires_grad_()
        optimiser = torch.optim.SGD([x], lr=0.3, weight_decay=0.01)
        for _ in range(7):
            optimiser.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(linear_scores(x), target[None]).backward()
            optimiser.step()
        torch.testing.assert_close(got, x.detach()[0], rtol=1e-12, atol=1e-14)


def test_a_step_by_hand():
    """Of linear scores W x the slope is W'(sigma(Wx) - y) / C."""
    images, targets = inputs()
    x = images.flatten(1).numpy()
    W = WEIGHT.numpy()
    slope = (1 / (1 + np.exp(-x @ W.T)) - targets.numpy()) @ W / 4
    found = perturbed(images, targets, linear_scores, steps=1, rate=0.5, weight_decay=0.1)
    np.testing.assert_allclose(found.flatten(1).numpy(), x - 0.5 * (slope + 0.1 * x), rtol=1e-12)


def test_it_goes_towards_confidence_and_leaves_its_arguments_alone():
    images, targets = inputs()
    before = images.clone()
    found = perturbed(images, targets, linear_scores, steps=50, rate=0.1, weight_decay=1e-5)
    losses = [torch.nn.functional.binary_cross_entropy_with_logits(linear_scores(x), targets) for x in (images, found)]
    assert losses[1] < 0.5 * losses[0]
    assert torch.equal(images, before)
    assert not found.requires_grad
    assert torch.equal(perturbed(images, targets, linear_scores, 0, 0.1, 1e-5), images)


def test_a_networks_weights_get_no_gradient():
    layer = torch.nn.Linear(12, 4)
    images, targets = (value.float() for value in inputs())
    perturbed(images, targets, lambda x: layer(x.flatten(1)), steps=2, rate=0.1, weight_decay=0)
    assert layer.weight.grad is None
