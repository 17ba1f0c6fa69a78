"""A data set, loaded once for all jobs of a process that need it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.shared import described, is_sharing, shared, state_of
from fcl_bench.data.sources.base import Dataset, Source, Split

#: Bytes to locate one image on the disk: at most a path.
_PLACE = 500


def loaded(source: Source) -> Dataset:
    """The result of `source.load()`, or that of an earlier job if none of the files that it reads has changed."""
    return shared("dataset", _key(source) if is_sharing() else None, source.load, _bytes)


def _key(source: Source) -> list[Any] | None:
    # A third-party class may have nothing but `load`.
    reads = source.reads() if isinstance(source, Source) else None
    state = None if reads is None else state_of(reads)
    return None if state is None else [*described(source), state]


def _bytes(dataset: Dataset) -> int:
    return sum(map(_side_bytes, (dataset.train, dataset.test)))


def _side_bytes(split: Split) -> int:
    """Bytes of the arrays and of the images' locations; encoded images stay in their files."""
    inputs = split.inputs.pixels if isinstance(split.inputs, ArrayImages) else split.inputs
    arrays = (split.labels, split.domains, inputs)
    places = 0 if isinstance(inputs, np.ndarray) else _PLACE * len(split)
    return places + sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
