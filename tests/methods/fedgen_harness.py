"""A small generator, and its tensors in NumPy."""

from __future__ import annotations

import numpy as np

from fcl_bench.methods.data_free.generators.features import FeatureGenerator


def made_generator(dimension: int = 4, hidden: int = 7, noise: int = 3, classes: int = 5) -> FeatureGenerator:
    generator = FeatureGenerator(dimension, hidden, noise, seed=3)
    generator.grow(classes)
    return generator.double()


def plain(generator: FeatureGenerator) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in generator.state().items()}
