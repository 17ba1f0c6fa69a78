"""What a method learns from: images, or a frozen backbone's features, after the first stage if there is one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fcl_bench.backbones.backbone import Extractor
from fcl_bench.data.images.batches import load_pixels
from fcl_bench.data.shared import shared
from fcl_bench.data.sources.base import Split
from fcl_bench.engine.transport import Connection
from fcl_bench.errors import UserError
from fcl_bench.execution.plan import Plan
from fcl_bench.files import user_path, writable

if TYPE_CHECKING:
    from fcl_bench.backbones.extract import FeatureCache, Features
    from fcl_bench.execution.adapt import Adapted


@dataclass(frozen=True)
class Inputs:
    """The whole data set as the method sees it.

    Attributes:
        train, test: features (n, d), or images (n, 3, h, w) in uint8.
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
        folder: the run's, where an unfinished first stage is kept if there is no cache.
    """
    settings, context = plan.settings, plan.context
    network, device = context.network, context.device
    if settings.method.trains_network:
        assert network is not None
        return Inputs(*load_images(plan))
    from fcl_bench.backbones.extract import FeatureCache

    folder_of_cache = cache_folder(plan)
    extractor, adapted = plan.extractor, None
    if extractor is None:
        from fcl_bench.execution.adapt import adapt, adapted_extractor

        assert network is not None
        adapted = adapt(plan, lambda: load_images(plan), folder_of_cache or folder / "checkpoint", link)
        extractor = adapted_extractor(settings.backbone, adapted.body, network, device)
        link.hand_on(adapted.trained)
    cache = None if folder_of_cache is None else FeatureCache(folder_of_cache)
    features = _features(plan, extractor, cache, link)
    require_range(features, context.dtype)
    return Inputs(
        features.train, features.test, features, adapted, *map(extractor.identity.get, ("weights", "precision"))
    )


def _features(plan: Plan, extractor: Extractor, cache: FeatureCache | None, link: Connection) -> Features:
    """The features from this run, an earlier one's cache, or an earlier job of this process."""
    from fcl_bench.backbones.extract import extract_features

    settings, dataset = plan.settings, plan.dealt.dataset
    if not settings.held_out.test:
        dataset = replace(dataset, test=dataset.train)  # the validation samples are there
    made = False

    def make() -> Features:
        nonlocal made
        made = True
        return extract_features(settings.backbone.name, extractor, dataset, cache, link.batches)

    sides = [split.fingerprint for split in (dataset.train, dataset.test)]
    # If several processes extract together, a process that does not take part would leave the others waiting.
    key = [extractor.identity, *sides] if settings.transport.sees_everything else None
    features = shared("features", key, make, lambda found: found.train.nbytes + found.test.nbytes)
    return features if made else replace(features, seconds=0.0, cache_hit=True)


def load_images(plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Training images of the data set, and those among which are the samples that it is tested on."""
    train = images_of(plan, plan.dealt.dataset.train)
    return train, images_of(plan, plan.dealt.dataset.test) if plan.settings.held_out.test else train


def images_of(plan: Plan, split: Split) -> torch.Tensor:
    """The images of a side of the data set, at a size that the network can take."""
    assert plan.context.network is not None
    return load_pixels(split, plan.context.network.size, what=f"data={plan.dealt.dataset.name}")


def cache_folder(plan: Plan) -> Path | None:
    """Where features and adapted networks are kept; None where nothing is worth it, or the user wants none."""
    cache = plan.settings.scalars.cache
    worth_it = plan.extractor is None or plan.extractor.cacheable
    return writable(f"cache.dir={cache.dir}", user_path("cache.dir", cache.dir)) if cache.enabled and worth_it else None


def require_range(features: Features, dtype: torch.dtype) -> None:
    """Raise a `UserError` for features whose squares overflow the statistics' type, or that are all zero."""
    sides = [side for side in (features.train, features.test) if side.numel()]
    if not sides:  # of a site without samples
        return
    largest = max(abs(float(end)) for side in sides for end in torch.aminmax(side))
    n, d = max(len(features.train), 1), features.train.shape[1]
    # 1e6 leaves room for a random projection of any usual width.
    if largest > (torch.finfo(dtype).max / (n * d * 1e6)) ** 0.5:
        raise UserError(
            f"features of size {largest:.3g} overflow statistics in dtype={str(dtype).removeprefix('torch.')}",
            "features of a smaller scale" + (", or dtype=float64" if dtype != torch.float64 else ""),
        )
    if largest == 0:
        raise UserError("features are all zero", "features that tell samples apart")
