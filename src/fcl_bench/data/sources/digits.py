"""scikit-learn's handwritten digits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import About, Dataset, Source, image_split, rank_in_group


@dataclass
class Digits(Source):
    """scikit-learn's 1,797 handwritten digits (8 x 8, 17 grey levels, brought to 0..255); no download.

    The source has no test split of its own; every fifth sample of each class, in file order, is a test sample.
    """

    name: str = knob("digits", filled=True, words="a name for tables")
    about = About(10, 1442, 355, licence="comes with scikit-learn (UCI, CC BY 4.0)")

    def load(self) -> Dataset:
        rows, labels = _read()
        pixels = np.rint(rows.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
        test = rank_in_group(labels) % 5 == 4
        sides = (image_split(labels[own], ArrayImages(pixels[own])) for own in (~test, test))
        return Dataset(self.name, *sides)


@cache
def _read() -> tuple[np.ndarray, np.ndarray]:
    """(n, 64) grey levels and (n,) int64 labels: `load_digits`, whose import takes half as long as `import torch`."""
    package = find_spec("sklearn")
    file = Path(str(package and package.origin)).parent / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        rows = np.loadtxt(file, delimiter=",")
        return rows[:, :-1], rows[:, -1].astype(np.int64)
    # Of a version that keeps it elsewhere.
    from sklearn.datasets import load_digits

    grey, labels = load_digits(return_X_y=True)
    return grey, labels.astype(np.int64)
