"""Networks to train, small images for them, and checkpoints."""

from __future__ import annotations

import numpy as np
import timm
import torch
from safetensors.torch import save_file

from fcl_bench.backbones.timm_backbone import Adapters, Timm, Transform
from fcl_bench.backbones.tiny import Tiny
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import Dataset, Split, image_split

CPU = torch.device("cpu")
RESNET = "test_resnet"  # timm's own networks for tests
VIT = "test_vit"
SMALL = Transform(size=32, crop_pct=1.0, mean=[0.5071, 0.4865, 0.4409], std=[0.2673, 0.2564, 0.2762])
FEATURES = Dataset("features", *[Split(np.zeros(3, dtype=np.int64), np.zeros((3, 2)), "x")] * 2)


def images(size: int = 32, count: int = 10) -> Dataset:
    rng = np.random.default_rng(0)
    sides = (rng.integers(0, 256, (n, size, size, 3), dtype=np.uint8) for n in (count, 4))
    return Dataset("made", *(image_split(np.arange(len(side)) % 2, ArrayImages(side)) for side in sides))


def scratch(name: str = RESNET, **knobs) -> Timm:
    return Timm(name, pretrained=False, **{"transform": SMALL, **knobs})


def vit(**knobs) -> Timm:
    return scratch(VIT, transform=Transform(), **knobs)


BACKBONES = {
    "tiny": Tiny(),
    "resnet": scratch(),
    "cifar stem": scratch(stem="cifar"),
    "cifar stem, 2 x 2 cells": scratch(stem="cifar", pool=2),
    "vit": vit(),
    "vit with adapters": vit(adapters=Adapters(8)),
}


def checkpoint(folder, name: str, change=lambda model: None) -> tuple[str, torch.nn.Module]:
    model = timm.create_model(name, num_classes=0)
    change(model)
    save_file(model.state_dict(), folder / "weights.safetensors")
    return str(folder / "weights.safetensors"), model.eval()
