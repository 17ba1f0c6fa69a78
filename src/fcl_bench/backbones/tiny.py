"""A small convolutional network for tests and demonstrations on a CPU."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from fcl_bench.backbones.backbone import Backbone, Extractor, require_images
from fcl_bench.backbones.network_extractor import NetworkExtractor
from fcl_bench.backbones.trainable import Trainable, copies, seeded, weights_hash
from fcl_bench.config import knob
from fcl_bench.data.sources.base import Dataset
from fcl_bench.randomness import derived_seed

log = logging.getLogger(__name__)

#: Per channel, on pixels scaled to 0..1: the network sees -1..1.
_HALF = (0.5, 0.5, 0.5)
#: Images from this side on are halved three times, smaller ones twice.
_LARGE = 16


@dataclass
class Tiny(Backbone):
    """Four times convolution, batch norm and ReLU, then global average pooling: d = 8 `width` features.

    Args:
        width: channels of the first stage; the others have 2, 4 and 8 times as many.
        size: side of the square images that it sees; None: the shorter side of the first training image.
    """

    name: ClassVar[str] = "tiny"  # type: ignore[misc]  # a timm network's name is a knob, this one is not
    width: int = knob(32, least=1)
    size: int | None = knob(None, least=1)

    @property
    def draws_weights(self) -> bool:
        return True

    def open(self, dataset: Dataset, device: torch.device, seed: int = 0) -> Extractor:
        trainable = self.trainable(dataset, seed)
        log.warning("backbone=tiny: the features are those of an untrained network")
        return NetworkExtractor(trainable.build(), trainable, device)

    def trainable(self, dataset: Dataset, seed: int) -> Trainable:
        """The network from scratch.

        Raises:
            UserError: the data holds features.
        """
        require_images(self.name, dataset)
        size = self.size or _shorter_side(dataset)
        with seeded(derived_seed(seed, "network")):
            body = _body(self.width, size)
        return Trainable(
            name=self.name,
            build=copies(body),
            dimension=8 * self.width,
            size=size,
            mean=_HALF,
            std=_HALF,
            stages=tuple(name for name, _ in body.named_children() if name.startswith("stage")),
            identity={
                "backbone": self.name,
                "width": str(self.width),
                "weights": weights_hash(body),
                "size": str(size),
                "mean": str(list(_HALF)),
                "std": str(list(_HALF)),
            },
        )


def _shorter_side(dataset: Dataset) -> int:
    inputs = dataset.train.inputs
    assert not isinstance(inputs, np.ndarray)
    return min(inputs[0].size)


def _body(width: int, size: int) -> nn.Sequential:
    """Images (b, 3, size, size) to features (b, 8 width)."""
    channels = [3, width, 2 * width, 4 * width, 8 * width]
    strides = [1, 2, 2, 2 if size >= _LARGE else 1]
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    for index, stride in enumerate(strides):
        modules[f"stage{index + 1}"] = nn.Sequential(
            nn.Conv2d(channels[index], channels[index + 1], kernel_size=3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(channels[index + 1]),
            nn.ReLU(inplace=True),
        )
    modules["pool"] = nn.AdaptiveAvgPool2d(1)
    modules["flatten"] = nn.Flatten()
    return nn.Sequential(modules)
