"""What a Flower app brings of its own: a network, and samples as the halves of a method take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fcl_bench.backbones.backbone import Trainable
from fcl_bench.data.images.batches import Standardise
from fcl_bench.environment import exact_kernels
from fcl_bench.errors import UserError, kind_of
from fcl_bench.protocol.context import Context
from fcl_bench.randomness import derived_seed, seeded

_HALF = (0.5, 0.5, 0.5)
#: Images per forward pass of a frozen network.
_BATCH = 256


@dataclass(frozen=True)
class Body:
    """A network without its classifier. Methods that train a network start from it; others take its features.

    Attributes:
        build: makes the network: standardised images (b, 3, size, size) to features (b, d). Every process calls it, and
            all have to get the same weights: random ones are drawn from the run's seed, by torch's own generator.
        size: side in pixels of the square images that the network sees; others are resized.
        mean, std: per channel, of pixels from 0 to 1.
        stages: names of its parts in forward order, which `frozen_stages` of a method counts.
    """

    build: Callable[[], torch.nn.Module]
    size: int
    mean: tuple[float, float, float] = _HALF
    std: tuple[float, float, float] = _HALF
    stages: tuple[str, ...] = ()

    def trainable(self, seed: int) -> Trainable:
        """The network as a method trains it. Raises a `UserError`: it gives no features (1, d) for an image."""
        with seeded(derived_seed(seed, "network")):
            body = self.build()
        with torch.inference_mode():
            features = body.eval()(torch.zeros(1, 3, self.size, self.size))
        if features.ndim != 2:
            raise UserError(f"Body.build: an image gives {kind_of(features)}", "features (1, d)")
        about: Any = {"name": "body", "dimension": features.shape[1], "size": self.size, "stages": self.stages}
        return Trainable.of(body, {"backbone": "body"}, mean=self.mean, std=self.std, **about)


def as_inputs(given: Any, body: Trainable | None, trains: bool, context: Context) -> torch.Tensor:
    """A loader's samples as the halves take them: features (n, d), or images (n, 3, h, w) in uint8.

    Args:
        given: arrays or tensors, features (n, d), or images (n, 3, h, w) or (n, h, w) in uint8.
        body: gives the features of images, unless the method trains it.
        trains: whether the method trains it.
        context: says where and in which type the features are computed with.

    Raises:
        UserError: they are something else, or not what the method takes.
    """
    samples = torch.as_tensor(given)
    images = samples.dtype == torch.uint8
    if images and samples.ndim == 3:
        samples = samples.unsqueeze(1).repeat(1, 3, 1, 1)
    if images and (samples.ndim != 4 or samples.shape[1] != 3):
        raise UserError(f"the loader gives {kind_of(given)}", "images (n, 3, h, w) or (n, h, w)")
    if images and body is None:
        raise UserError("the loader gives images, and the app has no network for them", "network=Body(...)")
    if not images and (trains or samples.ndim != 2 or not samples.is_floating_point()):
        raise UserError(
            f"the loader gives {kind_of(given)}", "images in uint8" if trains else "features (n, d), or images in uint8"
        )
    if images and not trains:
        assert body is not None
        samples = _features(body, samples, context.device)
    return samples if trains else samples.to(context.device, context.dtype)


def _features(body: Trainable, images: torch.Tensor, device: torch.device) -> torch.Tensor:
    network, standardise = body.build().eval().to(device), Standardise(body.size, body.mean, body.std)
    with torch.inference_mode(), exact_kernels():
        found = [network(standardise(batch.to(device))) for batch in images.split(_BATCH)]
    return torch.cat(found) if found else torch.zeros(0, body.dimension)


def as_columns(labels: Any, order: Sequence[int], where: str) -> np.ndarray:
    """A loader's labels (n,) as columns of the label matrix, -1 for a sample without a label.

    Args:
        order: the label of each column.
        where: begins the message, such as "client 3, task 0".

    Raises:
        UserError: one of them has no column.
    """
    given = np.asarray(labels)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise UserError(f"{where}: the loader's labels are {kind_of(given)}", "whole numbers (n,)")
    places = {label: column for column, label in enumerate(order)} | {-1: -1}
    if strange := sorted(set(given.tolist()) - places.keys()):
        raise UserError(f"{where}: the loader gives the label {strange[0]}", f"{list(order)}, or -1 for none")
    return np.array([places[label] for label in given.tolist()], dtype=np.int64)
