"""What the tests of data sources share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from fcl_bench.data.sources.hub_images import HubImages


def hub(path: Path | None, **changes) -> HubImages:
    knobs = {"name": "tiny", "repo": "someone/tiny", "revision": "a" * 40}
    knobs |= {"image_column": "img", "label_column": "label"}
    return HubImages(**{**knobs, **changes}, path=None if path is None else str(path))


def write_folder(root: Path) -> Path:
    """Classes with spaces and non-Latin letters; grey, RGBA, palette and 16-bit images of several sizes."""
    rng = np.random.default_rng(0)
    kinds = {"RGB": (6, 5, 3), "RGBA": (4, 4, 4), "L": (7, 7)}
    for side in ("train", "test"):
        for name in ("a cat", "Katze ß", "猫"):
            (root / side / name).mkdir(parents=True)
            for number, (mode, shape) in enumerate(kinds.items()):
                pixels = rng.integers(0, 256, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(root / side / name / f"{number} {mode}.png")
            Image.fromarray(rng.integers(0, 2**16, (5, 5), dtype=np.uint16)).save(root / side / name / "deep.tiff")
            (root / side / name / "notes.txt").write_text("not an image")
    return root
