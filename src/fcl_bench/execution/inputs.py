"""What a method learns from: images, or a frozen backbone's features, after the first stage if there is one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fcl_bench import environment
from fcl_bench.backbones.backbone import Extractor
from fcl_bench.backbones.extract import FeatureCache, Features, extract_features
from fcl_bench.backbones.network_extractor import FrozenNetwork
from fcl_bench.data.images.batches import load_pixels
from fcl_bench.data.shared import shared
from fcl_bench.data.sources.base import Split
from fcl_bench.engine.transport import Connection
from fcl_bench.errors import UserError
from fcl_bench.execution.plan import Plan
from fcl_bench.files import user_path, writable

if TYPE_CHECKING:
    from fcl_bench.execution.adapt import Adapted

log = logging.getLogger(__name__)

#: Relative rounding of float32, and so of 16-bit types with their scales, at best.
_FLOAT32 = torch.finfo(torch.float32).eps
#: Parameters of the network times images that pass through it, from which on a run counts as long: ResNet-18 with 9,000
#: images, which is minutes on one core.
_LONG = 1e11


@dataclass(frozen=True)
class Inputs:
    """The whole data set as the method sees it.

    Attributes:
        train, test: features (n, d), or images (n, 3, h, w) in uint8.
        features: the result and cost of extraction; None for images.
        adapted: the first stage; None if there was none.
        weights: hash of the network that the features come from; None for images.
        precision: of that network's forward pass; None where there is none.
    """

    train: torch.Tensor
    test: torch.Tensor
    features: Features | None = None
    adapted: Adapted | None = None
    weights: str | None = None
    precision: str | None = None


def prepare_inputs(plan: Plan, folder: Path, link: Connection) -> Inputs:
    """Load the images, adapt the network, extract features: whatever the plan needs.

    Args:
        plan: of the run.
        folder: the run's, where an unfinished first stage is kept if there is no cache.
        link: to the processes of the clients, who train the first stage.
    """
    settings, context = plan.settings, plan.context
    network, device = context.network, context.device
    if settings.method.trains_network:
        assert network is not None
        return Inputs(*load_images(plan))
    cache_folder = _cache_folder(plan)
    extractor, adapted = plan.extractor, None
    if extractor is None:
        from fcl_bench.execution.adapt import adapt, adapted_extractor

        assert network is not None
        adapted = adapt(plan, lambda: load_images(plan), cache_folder or folder / "checkpoint", link)
        extractor = adapted_extractor(settings.backbone, adapted.body, network, device)
        link.hand_on(adapted.trained)
    cache = None if cache_folder is None else FeatureCache(cache_folder)
    features = _features(plan, extractor, cache, link)
    require_range(features, context.dtype, context.wire.dtype)
    return Inputs(
        features.train, features.test, features, adapted, *map(extractor.identity.get, ("weights", "precision"))
    )


def _features(plan: Plan, extractor: Extractor, cache: FeatureCache | None, link: Connection) -> Features:
    """The features from this run, an earlier one's cache, or an earlier job of this process."""
    settings, dataset = plan.settings, plan.dealt.dataset
    if not settings.held_out.test:
        dataset = replace(dataset, test=dataset.train)  # the validation samples are there
    made = False

    def make() -> Features:
        nonlocal made
        made = True
        return extract_features(settings.backbone.name, extractor, dataset, cache, batches)

    def batches(extractor: Extractor, side: str, split: Split, start: int) -> Iterator[torch.Tensor]:
        if isinstance(extractor, FrozenNetwork):
            tell_of_extraction(extractor.body, extractor.identity["precision"], plan.context.device, len(split) - start)
        return link.batches(extractor, side, split, start)

    sides = [split.fingerprint for split in (dataset.train, dataset.test)]
    # If several processes extract together, a process that does not take part would leave the others waiting.
    key = [extractor.identity, *sides] if settings.transport.sees_everything else None
    # What is logged is of the pass and of the cache, which a job that takes features over has nothing to do with.
    features = shared("features", key, make, lambda found: found.train.nbytes + found.test.nbytes, of_value=False)
    return features if made else replace(features, seconds=0.0, cache_hit=True)


def load_images(plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Training images of the data set, and those among which are the samples that it is tested on."""
    train = images_of(plan, plan.dealt.dataset.train)
    return train, images_of(plan, plan.dealt.dataset.test) if plan.settings.held_out.test else train


def images_of(plan: Plan, split: Split) -> torch.Tensor:
    """The images of a side of the data set, at a size that the network can take."""
    assert plan.context.network is not None
    return load_pixels(split, plan.context.network.size, what=f"data={plan.dealt.dataset.name}")


def _cache_folder(plan: Plan) -> Path | None:
    """Where features and adapted networks are kept; None where nothing is worth it, or the user wants none."""
    cache = plan.settings.scalars.cache
    worth_it = plan.extractor is None or plan.extractor.cacheable
    return writable(f"cache.dir={cache.dir}", user_path("cache.dir", cache.dir)) if cache.enabled and worth_it else None


def require_range(features: Features, dtype: torch.dtype, wire: torch.dtype) -> None:
    """Refuse features whose squares leave the range of the statistics' types; warn of a sample that dwarfs all others.

    Args:
        features: training and test features.
        dtype: of the statistics.
        wire: of uploads. In 16-bit types they travel with float32 scales.

    Raises:
        UserError: squares of features overflow, or vanish beside the smallest number of a type.
    """
    sizes = [_row_sizes(side) for side in (features.train, features.test)]
    if not any(map(len, sizes)):  # of a site without samples
        return
    largest = max(float(rows.max()) for rows in sizes if len(rows))
    n, d = max(len(features.train), 1), features.train.shape[1]
    # 1e6 leaves room for a random projection of any usual width.
    if largest > (torch.finfo(dtype).max / (n * d * 1e6)) ** 0.5:
        raise UserError(
            f"features of size {largest:.3g} overflow statistics in {_named('dtype', dtype)}",
            "features of a smaller scale" + (", or dtype=float64" if dtype != torch.float64 else ""),
        )
    if largest == 0:
        raise UserError("features are all zero", "features that tell samples apart")
    for key, kind in (("dtype", dtype), ("wire.dtype", wire)):
        info = torch.finfo(torch.float64 if kind == torch.float64 else torch.float32)
        # Below this the largest squares lose digits, and most others vanish.
        if largest < (info.tiny / info.eps) ** 0.5:
            raise UserError(
                f"features of size {largest:.3g} underflow statistics in {_named(key, kind)}",
                "features of a larger scale" + (f", or {key}=float64" if kind != torch.float64 else ""),
            )
    if len(sizes[0]):  # not of training samples that are elsewhere
        rounding = max(torch.finfo(kind).eps if kind == torch.float64 else _FLOAT32 for kind in (dtype, wire))
        _tell_outlier(sizes[0], rounding)


def _row_sizes(side: torch.Tensor) -> torch.Tensor:
    """(n,) the largest absolute feature of each sample."""
    if not side.numel():
        return torch.zeros(len(side))
    low, high = torch.aminmax(side, dim=1)
    return torch.maximum(low.abs(), high.abs()).to(torch.float64)


def _named(key: str, dtype: torch.dtype) -> str:
    return f"{key}={str(dtype).removeprefix('torch.')}"


def _tell_outlier(sizes: torch.Tensor, rounding: float) -> None:
    """Warn of a training sample so large that all others are lost to rounding."""
    row, usual = int(sizes.argmax()), float(sizes.median())
    if 0 < usual * (len(sizes) / rounding) ** 0.5 < float(sizes[row]):
        log.warning(
            "training sample %d has a feature of size %.3g and half of all samples none above %.3g: its part of any sum"
            " of squares hides theirs; check it, or leave it out",
            row,
            float(sizes[row]),
            usual,
        )


def tell_of_extraction(network: torch.nn.Module, precision: str, device: torch.device, n: int) -> None:
    """Print a hint if features of n images are extracted in float32 on a CPU that has bfloat16."""
    long = n * sum(weight.numel() for weight in network.parameters()) >= _LONG
    if long and precision == "float32" and device.type == "cpu" and environment.multiplies_bfloat16():
        log.info(
            "this CPU multiplies bfloat16 in hardware, and float32 is slower: backbone.precision=bfloat16 is another"
            " run, with numbers rounded otherwise"
        )
