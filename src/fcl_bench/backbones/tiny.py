"""Small networks for tests and demonstrations on a CPU: a convolutional one, and a vision transformer."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fcl_bench.backbones.backbone import PRECISIONS, Backbone, Extractor, Trainable, require_kind
from fcl_bench.config import knob
from fcl_bench.data.sources.base import Dataset
from fcl_bench.errors import UserError
from fcl_bench.randomness import derived_seed, seeded

log = logging.getLogger(__name__)

#: Per channel, on pixels scaled to 0..1: the network sees -1..1.
_HALF = (0.5, 0.5, 0.5)
#: Images of at least this side (pixels) are halved three times, smaller ones twice.
_LARGE = 16
#: Patches of a vision transformer from left to right.
_PATCHES = 4


@dataclass
class Tiny(Backbone):
    """A network of thousands of weights, from scratch, with d = 8 `width` features.

    `conv` is four blocks of convolution, batch norm and ReLU, then global average pooling. `vit` is timm's vision
    transformer with four blocks on 16 patches; its output is that of the class token.
    """

    name: ClassVar[str] = "tiny"  # type: ignore[misc]  # a timm network's name is a knob, this one is not
    width: int = knob(32, least=1, most=1024)
    size: int | None = knob(None, least=1, most=1024)
    architecture: str = knob("conv", choices=("conv", "vit"))
    precision: str = knob("auto", choices=("auto", *PRECISIONS))
    compile: bool = knob(False)

    @property
    def draws_weights(self) -> bool:
        return True

    def open(self, dataset: Dataset, device: torch.device, seed: int = 0) -> Extractor:
        from fcl_bench.backbones.network_extractor import NetworkExtractor

        trainable = self.trainable(dataset, seed)
        log.warning("backbone=tiny: the features are those of an untrained network")
        return NetworkExtractor(trainable.build(), trainable, device, self.precision)

    def trainable(self, dataset: Dataset, seed: int) -> Trainable:
        require_kind("images", self.name, dataset)
        size = self.size or min(dataset.train.inputs[0].size)  # of images, both sides
        with seeded(derived_seed(seed, "network")):
            body = (_transformer if self.architecture == "vit" else _body)(self.width, size)
        kind = self.name if self.architecture == "conv" else f"{self.name} {self.architecture}"
        return Trainable.of(
            body,
            {"backbone": kind, "width": str(self.width)},
            name=self.name,
            dimension=8 * self.width,
            size=size,
            mean=_HALF,
            std=_HALF,
            stages=tuple(name for name, _ in body.named_children() if name.startswith("stage")),
            compiled=self.compile,
        )


def _transformer(width: int, size: int) -> nn.Module:
    """Images (b, 3, size, size) to features (b, 8 width), by 4 x 4 patches and heads of about 16 features."""
    from timm.models.vision_transformer import VisionTransformer

    if size % _PATCHES:
        raise UserError(
            f"backbone.architecture=vit: images of {size} pixels are not {_PATCHES} patches wide",
            f"backbone.size={_PATCHES * -(-size // _PATCHES)}, to which they are resized",
        )
    dimension = 8 * width
    heads = next(heads for heads in range(max(1, dimension // 16), 0, -1) if dimension % heads == 0)
    return VisionTransformer(
        img_size=size, patch_size=size // _PATCHES, embed_dim=dimension, depth=4, num_heads=heads, num_classes=0
    )


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
