"""scikit-learn's handwritten digits."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.groups import rank_in_group
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import About, Dataset, Source
from fcl_bench.data.sources.image_source import image_split


@dataclass
class Digits(Source):
    """scikit-learn's 1,797 handwritten digits (8 x 8, 17 grey levels, brought to 0..255); no download.

    The source has no test split of its own; every fifth sample of each class, in file order, is a test sample.
    """

    name: str = knob("digits", filled=True, words="a name for tables")

    def facts(self) -> About:
        return About(10, 1442, 355, licence="comes with scikit-learn (UCI, CC BY 4.0)")

    def reads(self) -> list[Path]:
        return []  # of an installed package, which this process has imported

    def load(self) -> Dataset:
        rows = np.loadtxt(_file(), delimiter=",")
        pixels = np.rint(rows[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
        labels = rows[:, -1].astype(np.int64)
        test = rank_in_group(labels) % 5 == 4
        return Dataset(
            self.name,
            image_split(labels[~test], ArrayImages(pixels[~test])),
            image_split(labels[test], ArrayImages(pixels[test])),
        )


def _file() -> Path:
    """What `sklearn.datasets.load_digits` reads. To import it takes as long as half of `import torch`."""
    package = find_spec("sklearn")
    assert package is not None, "ours depends on it"
    return Path(str(package.origin)).parent / "datasets" / "data" / "digits.csv.gz"
