"""Extract a data set's features with a frozen backbone, using the cache where that saves time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from fcl_bench.backbones.backbone import Extractor
from fcl_bench.backbones.cache import Extraction, FeatureCache
from fcl_bench.data.images.finite import rows_not_finite
from fcl_bench.data.sources.base import Dataset, Split
from fcl_bench.errors import UserError
from fcl_bench.files import slug
from fcl_bench.tracking.console import progress


@dataclass(frozen=True)
class Features:
    """Features of a whole data set on the CPU, in the precision they were extracted in.

    Attributes:
        train, test: (n, d).
        seconds: spent extracting in this run; 0 where the cache held them.
        cost: seconds that the extraction took, in this run or an earlier one.
        cache_hit: whether both splits came from the cache.
    """

    train: torch.Tensor
    test: torch.Tensor
    seconds: float
    cost: float
    cache_hit: bool


#: Yields the features of a side ("train", "test") of a data set from a given sample on, like `Extractor.batches`.
Batches = Callable[[Extractor, str, Split, int], Iterator[torch.Tensor]]


def extract_features(
    name: str, extractor: Extractor, dataset: Dataset, cache: FeatureCache | None, batches: Batches | None = None
) -> Features:
    """Run the frozen backbone over both splits of `dataset`.

    Args:
        name: name of the backbone, for messages and file names.
        extractor: the opened backbone.
        cache: the cache of features, or None.
        batches: computes the features; None: this process alone does.

    Raises:
        UserError: an image can't be read, features are not (n, d), or one is not finite.
    """
    made: dict[str, Extraction] = {}
    for side, split in (("train", dataset.train), ("test", dataset.test)):
        if side == "test" and split is dataset.train:  # it is tested on validation samples, which are among them
            made[side] = replace(made["train"], seconds=0.0, cost=0.0)
            continue
        label = "-".join(map(slug, (dataset.name, side, name)))
        # A test image of another size may give another number; that is told below.
        wide = extractor.dimension(split) if side == "train" else None
        source = partial(extractor.batches, split) if batches is None else partial(batches, extractor, side, split)
        rows = partial(_rows, name, side, wide, source)
        if cache is not None and extractor.cacheable:
            key = {**extractor.identity, "data": split.fingerprint}
            made[side] = cache.get(label, key, len(split), rows)
        else:
            made[side] = _uncached(label, split, rows(0))
        if len(made[side].features) != len(split):
            raise UserError(
                f"backbone={name} gave {len(made[side].features)} rows for {len(split)} {side} samples", "one for each"
            )
        bad = rows_not_finite(made[side].features)
        if len(bad):
            raise UserError(
                f"backbone={name} gave a feature that is not finite for {side} sample {int(bad[0])}",
                "finite numbers in the data"
                if dataset.holds_features
                else "backbone.precision=float32, or other weights",
            )
    train, test = made["train"], made["test"]
    if train.features.shape[1] != test.features.shape[1]:
        raise UserError(
            f"backbone={name} gave {train.features.shape[1]} features for train and {test.features.shape[1]} for test",
            "backbone.size=32 brings images of several sizes or colours to one",
        )
    return Features(
        train.features,
        test.features,
        train.seconds + test.seconds,
        train.cost + test.cost,
        train.hit and test.hit,
    )


def _rows(
    name: str, side: str, wide: int | None, batches: Callable[[int], Iterator[torch.Tensor]], start: int
) -> Iterator[torch.Tensor]:
    """Yield features from sample `start` on. A `UserError` tells of others than rows of `wide` numbers (None: any)."""
    for features in batches(start):
        if features.ndim != 2 or wide not in (None, features.shape[1]):
            raise UserError(
                f"backbone={name} gave {side} features of the shape {tuple(features.shape)}",
                f"(samples, {'d' if wide is None else wide}), as its dimension says",
            )
        yield features


def _uncached(label: str, split: Split, batches: Iterable[torch.Tensor]) -> Extraction:
    begin = time.perf_counter()
    parts = []
    with progress(len(split), f"extracting {label}", "sample") as bar:
        for features in batches:
            parts.append(features)
            bar.update(len(features))
    seconds = time.perf_counter() - begin
    return Extraction(parts[0] if len(parts) == 1 else torch.cat(parts), seconds, seconds, hit=False)
