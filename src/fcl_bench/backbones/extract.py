"""A data set's features by a frozen backbone, and their cache on the disk where that saves time.

The cache is keyed by all inputs that determine features, atomic, and shared by parallel runs.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fcl_bench.backbones.backbone import Extractor
from fcl_bench.data.sources.base import Dataset, Split
from fcl_bench.errors import UserError
from fcl_bench.files import content_hash, json_hash, locked, regular, remove_leftovers, replacing, slug
from fcl_bench.linalg.tensors import rows_not_finite
from fcl_bench.tracking.console import progress

log = logging.getLogger(__name__)

#: An interrupted extraction loses at most this many seconds of work (plus one batch).
SECONDS_PER_CHUNK = 20.0


@dataclass(frozen=True)
class Extraction:
    """Features (n, d) of one split, and the seconds that they cost.

    Attributes:
        seconds: spent on the forward pass in this run; 0 for a cache hit.
        cost: seconds that the whole forward pass took, in this run or an earlier one.
        hit: whether the cache held them.
    """

    features: torch.Tensor
    seconds: float
    cost: float
    hit: bool


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Hash of a tensor's type, shape and bytes."""
    digest = content_hash(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _save(path: Path, features: torch.Tensor, seconds: float, key: dict[str, str]) -> None:
    checksum = tensor_checksum(features)
    metadata = {"checksum": checksum, "seconds": repr(seconds), "key": json.dumps(key, sort_keys=True)}
    with replacing(path) as temporary:
        save_file({"features": features.contiguous()}, temporary, metadata=metadata)


def _load(path: Path, key: dict[str, str]) -> tuple[torch.Tensor, float] | None:
    """The features of `key` and their cost in seconds; None if the file is absent, damaged or for another key."""
    if not path.exists():
        return None
    try:
        with safe_open(regular(path), framework="pt") as file:
            features, metadata = file.get_tensor("features"), file.metadata() or {}
        checksum, seconds = metadata["checksum"], float(metadata["seconds"])
        if metadata["key"] != json.dumps(key, sort_keys=True):
            log.warning("cached features %s are of other data or another backbone; extracting again", path)
            return None
    except (SafetensorError, OSError, LookupError, ValueError) as error:
        log.warning("cached features %s are damaged (%s); extracting again", path, error)
        return None
    if checksum != tensor_checksum(features):
        log.warning("cached features %s do not match their checksum; extracting again", path)
        return None
    return features, seconds


def _hit(path: Path, key: dict[str, str], count: int) -> Extraction | None:
    found = _load(path, key)
    if found is None or len(found[0]) != count:
        return None
    return Extraction(found[0], seconds=0.0, cost=found[1], hit=True)


class FeatureCache:
    """A folder of features, one .safetensors file per (weights, transform, precision, data split).

    While a split is extracted, finished chunks are in a `.partial` folder, from which an interrupted pass resumes. A
    lock lets parallel runs share the work: one extracts, the others wait and read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(
        self,
        label: str,
        key: dict[str, str],
        count: int,
        batches: Callable[[int], Iterator[torch.Tensor]],
    ) -> Extraction:
        """The features for `key`, from the cache or, once, from `batches`.

        Args:
            batches: yields features (b, d) in order from a given sample on.
        """
        path = self.folder / f"{label}-{json_hash(key)}.safetensors"
        if (found := _hit(path, key, count)) is not None:
            return found
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock"), f"extracting {label}"):
            remove_leftovers(path)
            # Another run may have finished while this one waited for the lock.
            if (found := _hit(path, key, count)) is not None:
                return found
            partial = _Partial(path.with_suffix(".partial"), key)
            before = partial.seconds
            if partial.rows:
                log.info("extraction of %s goes on after %d of %d samples", label, partial.rows, count)
            with progress(count, f"extracting {label}", "sample", done=partial.rows) as bar:
                for features in batches(partial.rows):
                    partial.add(features)
                    bar.update(len(features))
            features = partial.concatenated()
            if len(features) != count:
                raise UserError(
                    f"the backbone gave {len(features)} rows for the {count} samples of {label}", "one for each"
                )
            _save(path, features, partial.seconds, key)
            shutil.rmtree(partial.folder, ignore_errors=True)
        return Extraction(features, seconds=partial.seconds - before, cost=partial.seconds, hit=False)


class _Partial:
    """The chunks of a running extraction, on disk in order, and the batches since the last chunk."""

    def __init__(self, folder: Path, key: dict[str, str]) -> None:
        self.folder = folder
        self.rows = 0
        self.seconds = 0.0
        self._key = key
        self._chunks: list[torch.Tensor] = []
        self._pending: list[torch.Tensor] = []
        while (found := _load(self._next(), self._part())) is not None:
            self._chunks.append(found[0])
            self.rows += len(found[0])
            self.seconds += found[1]
        self._since = time.perf_counter()

    def _next(self) -> Path:
        return self.folder / f"{self.rows:010d}.safetensors"

    def _part(self) -> dict[str, str]:
        """The key of the next chunk: whose features it holds, and its first row."""
        return {**self._key, "first row": str(self.rows)}

    def add(self, features: torch.Tensor) -> None:
        self._pending.append(features)
        seconds = time.perf_counter() - self._since
        if seconds < SECONDS_PER_CHUNK:
            return
        chunk = torch.cat(self._pending)
        _save(self._next(), chunk, seconds, self._part())
        self._chunks.append(chunk)
        self._pending = []
        self.rows += len(chunk)
        self.seconds += seconds
        self._since = time.perf_counter()

    def concatenated(self) -> torch.Tensor:
        """All features (n, d) at the end, the pending ones and their seconds included."""
        if self._pending:
            self.seconds += time.perf_counter() - self._since
        return torch.cat([*self._chunks, *self._pending])


@dataclass(frozen=True)
class Features:
    """Features of a whole data set on the CPU, in the precision they were extracted in.

    Attributes:
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
                if dataset.kind == "features"
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
