"""What a gradient gives away: the image, up to rounding."""

from __future__ import annotations

import pytest
import torch

from fcl_bench.methods.exemplars.inversion import GradientEncoder, pixel_bytes, reconstruct
from tests.training.inversion.test_encoder import samples


def small(classes: int = 4) -> GradientEncoder:
    return GradientEncoder((8, 8), classes, 0, (2, 1), torch.float64)


def errors(found: torch.Tensor, images: torch.Tensor) -> list[float]:
    return (found - images).square().mean(dim=(1, 2, 3)).tolist()


@pytest.mark.slow
def test_an_image_is_reconstructed_from_its_gradient():
    encoder = small()
    images, labels = samples(3, 4)
    found = reconstruct(encoder, encoder.gradients(images, labels), 0, rate=0.5, iterations=40, last=3, inner=10)
    assert torch.equal(found.labels, labels)
    assert found.images.shape == (3, 3, 3, 8, 8)
    assert max(errors(found.images[:, -1], images)) < 1e-3
    again = (encoder.gradients(found.images[:, -1], labels) - encoder.gradients(images, labels)).square().sum(dim=1)
    torch.testing.assert_close(found.losses, again)
    # A random image is nowhere near.
    assert min(errors(torch.rand_like(images), images)) > 0.1


def plain_loss(weights: list[torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    for stride, weight, bias in zip((2, 1), weights[:-2:2], weights[1:-2:2], strict=True):
        image = torch.nn.functional.conv2d(image, weight, bias, stride, padding=2).sigmoid()
    return torch.nn.functional.cross_entropy(image.flatten(1) @ weights[-2].T + weights[-1], label)


def test_each_gradient_is_inverted_as_by_torch():
    """Point for point against torch's solver on one gradient alone, with autograd in a loop."""
    encoder = small()
    images, labels = samples(2, 4, seed=1)
    gradients = encoder.gradients(images, labels)
    found = reconstruct(encoder, gradients, 5, rate=0.1, iterations=6, last=4, inner=3)
    start = torch.randn((2, 192), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    weights = [weight.clone().requires_grad_() for weight in encoder._weights]
    for context in range(2):
        x = start[context].reshape(1, 3, 8, 8).clone().requires_grad_()
        solver, seen = torch.optim.LBFGS([x], lr=0.1, max_iter=3, max_eval=9), []

        def closure(x=x, context=context, solver=solver):
            solver.zero_grad()
            loss = plain_loss(weights, x, labels[context : context + 1])
            own = torch.cat([part.flatten() for part in torch.autograd.grad(loss, weights, create_graph=True)])
            apart = (own - gradients[context]).square().sum()
            apart.backward()
            return apart

        for _ in range(6):
            solver.step(closure)
            seen.append(x.detach()[0].clone())
        torch.testing.assert_close(found.images[context], torch.stack(seen[-4:]), rtol=1e-6, atol=1e-8)


def test_the_seed_decides_and_the_last_images_are_the_last():
    encoder = small()
    gradients = encoder.gradients(*samples(2, 4))
    few, again, other = (
        reconstruct(encoder, gradients, seed, rate=0.1, iterations=5, last=last, inner=2)
        for seed, last in ((1, 2), (1, 5), (2, 2))
    )
    assert torch.equal(few.images, again.images[:, 3:])
    assert torch.equal(few.losses, again.losses)
    assert not torch.equal(few.images, other.images)


def test_without_gradients_there_are_no_images():
    encoder = small()
    found = reconstruct(encoder, torch.empty(0, encoder.numbers, dtype=torch.float64), 0, 0.1, 3, 2)
    assert found.images.shape == (0, 2, 3, 8, 8)
    assert len(found.labels) == len(found.losses) == 0


def test_contexts_that_do_not_fit_at_a_time_are_cut(monkeypatch):
    encoder = small()
    gradients = encoder.gradients(*samples(3, 4))
    whole = reconstruct(encoder, gradients, 0, rate=0.1, iterations=4, last=2, inner=2)
    monkeypatch.setattr("fcl_bench.methods.exemplars.inversion._ROOM", 1)
    torch.testing.assert_close(
        reconstruct(encoder, gradients, 0, rate=0.1, iterations=4, last=2, inner=2).images,
        whole.images,
        rtol=1e-8,
        atol=1e-10,
    )


@pytest.mark.parametrize(
    ("pixel", "cut"), [(0.0, 0), (1.0, 255), (0.5, 128), (1.01, 255), (-0.01, 0), (2.5, 255), (-3.0, 0)]
)
def test_bytes(pixel, cut):
    one = torch.tensor([pixel])
    assert pixel_bytes(one).tolist() == [cut]
    assert pixel_bytes(one).dtype == torch.uint8
