"""Accuracy on reconstructed images, and the choice of the best models over a stream, by hand."""

from __future__ import annotations

import pytest
import torch

from fcl_bench.data.images.batches import Augment
from fcl_bench.methods.exemplars.proxy import BestModels, monitor_accuracy
from fcl_bench.protocol.state import restore, saved

# Accuracy -------------------------------------------------------------------------------------------------------------


def images_of(values: list[int], side: int = 8) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, side, side).contiguous()


def brightness(images: torch.Tensor) -> torch.Tensor:
    """Class 1 where the brightest pixel is above 100: a crop's black border changes nothing."""
    bright = (images.flatten(1).amax(dim=1) > 100).long()
    return torch.nn.functional.one_hot(bright, 2).float()


@pytest.mark.parametrize("count", [1, 63, 64, 65, 130])
def test_every_image_counts(count):
    """The published code leaves out an incomplete batch, and divides by zero below 64 images."""
    values = [200 if i % 3 else 50 for i in range(count)]
    labels = torch.tensor([1] * count)
    found = monitor_accuracy(images_of(values), labels, brightness, Augment("crop_flip"), seed=0)
    assert found == sum(value == 200 for value in values) / count


def test_images_are_augmented_by_the_seed():
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(256, (100, 3, 16, 16), generator=rng, dtype=torch.uint8)
    seen: list[torch.Tensor] = []

    def look(batch: torch.Tensor) -> torch.Tensor:
        seen.append(batch)
        return torch.zeros(len(batch), 2)

    labels = torch.zeros(100, dtype=torch.int64)
    for seed in (1, 1, 2):
        assert monitor_accuracy(images, labels, look, Augment("crop_flip"), seed) == 1.0
    first, again, other = (torch.cat(seen[i : i + 2]) for i in (0, 2, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, images)


# Best models ----------------------------------------------------------------------------------------------------------


def model(number: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.tensor([number])}


def number(found: dict[str, torch.Tensor]) -> float | None:
    return float(found["weight"]) if found else None


def run(best: BestModels, tasks: list[list[float]]) -> list[tuple[float | None, float | None]]:
    """(b1, b2) after each round; a round's model is task + round / 10."""
    seen = []
    for task, performances in enumerate(tasks):
        best.begin()
        for round_, performance in enumerate(performances):
            best.offer(model(task + round_ / 10), performance)
            last, now = number(best.last), number(best.best)
            seen.append(tuple(None if v is None else round(v, 1) for v in (last, now)))
    return seen


def test_the_papers_rule():
    """Equal performance is good enough, and each task starts anew."""
    found = run(BestModels(), [[0.5, 0.9, 0.9, 0.8], [0.2, 0.1, 0.3]])
    assert found == [(None, 0.0), (None, 0.1), (None, 0.2), (None, 0.2), (0.2, 1.0), (0.2, 1.0), (0.2, 1.2)]


def test_a_task_without_gradients_has_no_best_model():
    """The old model of the next task is then the last one, which has all heads, and not that of two tasks ago."""
    best = BestModels()
    run(best, [[0.5, 0.4]])
    best.begin()
    assert number(best.last) == 0.0
    best.begin()
    assert not best.last


def test_a_model_is_copied():
    best, own = BestModels(), model(1.0)
    best.offer(own, 0.0)
    own["weight"].fill_(5)
    assert number(best.best) == 1.0


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_a_resumed_choice_goes_on_as_the_other(rounds):
    one, other = BestModels(), BestModels()
    run(one, [[0.4], [0.5, 0.2, 0.7][:rounds]])
    restore(other, other.state, saved(one, one.state), torch.device("cpu"))
    for best in (one, other):
        best.offer(model(9.0), 0.6)
    assert (number(one.last), number(one.best)) == (number(other.last), number(other.best))
    assert run(one, [[0.6, 0.8], [0.1]]) == run(other, [[0.6, 0.8], [0.1]])
