"""A data set, loaded once for all jobs of a process that need it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.shared import described, is_sharing, shared, state_of
from fcl_bench.data.sources.base import Dataset, Source, Split
from fcl_bench.errors import UserError, kind_of

#: Bytes to locate one image on the disk: at most a path.
_PLACE = 500


def loaded(source: Source) -> Dataset:
    """The result of `source.load()`, or that of an earlier job if none of the files that it reads has changed.

    Raises:
        UserError: it is not what `Dataset` and `Split` say, as may happen with a class of one's own.
    """
    return shared("dataset", _key(source) if is_sharing() else None, lambda: _sound(source), _bytes)


def _sound(source: Source) -> Dataset:
    dataset, where = source.load(), f"{type(source).__name__}.load"
    if not isinstance(dataset, Dataset):
        raise UserError(f"{where} returned {kind_of(dataset)}", "a Dataset, such as Dataset(self.name, train, test)")
    for side in ("train", "test"):
        split, own = getattr(dataset, side), f"{where}: {side}"
        if not isinstance(split, Split):
            raise UserError(f"{own} is {kind_of(split)}", "a Split, such as Split(labels, inputs, fingerprint)")
        _require_numbers(f"{own}.labels", split.labels)
        _require_inputs(f"{own}.inputs", split.inputs)
        if split.domains is not None:
            _require_numbers(f"{own}.domains", split.domains)
        for name, values in (("inputs", split.inputs), ("domains", split.domains)):
            if values is not None and len(values) != len(split.labels):
                raise UserError(f"{own} has {len(split.labels)} labels and {len(values)} {name}", "as many of each")
    shapes = [side.inputs.shape[1:] for side in (dataset.train, dataset.test) if isinstance(side.inputs, np.ndarray)]
    if len(shapes) == 2 and shapes[0] != shapes[1]:
        found = f"{shapes[0][0]} features in train and {shapes[1][0]} in test"
        raise UserError(f"{where} gave {found}", "the same number in both")
    return dataset


def _require_numbers(where: str, values: Any) -> None:
    """Raise a `UserError` unless these are the numbers of samples' classes or domains."""
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
        raise UserError(f"{where} is {kind_of(values)}", "an array (n,) of int64")
    if len(values) and values.min() < 0:
        raise UserError(f"{where} holds {values.min()}", "numbers from 0 on")


def _require_inputs(where: str, inputs: Any) -> None:
    if isinstance(inputs, np.ndarray):
        right = inputs.ndim == 2 and inputs.shape[1] > 0 and inputs.dtype.kind in "fiu"
    else:
        right = hasattr(inputs, "fingerprint")
    if not right:
        raise UserError(
            f"{where} is {kind_of(inputs)}",
            "features, an array (n, d) of numbers; or images, such as ArrayImages(pixels)",
        )


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
