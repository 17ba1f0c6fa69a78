"""Fixtures of the tests of whole runs that train a network."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from fcl_bench.training.trainer import Trainer


@pytest.fixture
def trained(monkeypatch) -> list[int]:
    """Grows by one with every local training."""
    calls: list[int] = []
    train = Trainer.train

    def counted(self, network, images, *rest):
        calls.append(len(images))
        return train(self, network, images, *rest)

    monkeypatch.setattr(Trainer, "train", counted)
    return calls


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> tuple[str, ...]:
    """Six separable classes of 12 images of 8 x 8 pixels, 4 to test."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for label in range(6):
        centre = rng.integers(40, 216, (8, 8, 3))
        for side, count in (("train", 12), ("test", 4)):
            folder = root / side / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = (centre + rng.integers(-40, 41, centre.shape)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number:02}.png")
    return ("data=imagefolder", f"data.path={root}")
