"""What a method learns from: images, or a frozen backbone's features, after the first stage if there is one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fcl_bench.backbones.cache import FeatureCache
from fcl_bench.backbones.extract import Features, extract_features
from fcl_bench.backbones.network_extractor import NetworkExtractor
from fcl_bench.data.images.pixels import load_pixels
from fcl_bench.errors import UserError
from fcl_bench.files import writable
from fcl_bench.runs.adapt import Adapted, adapt
from fcl_bench.runs.plan import Plan


@dataclass(frozen=True)
class Inputs:
    """The whole data set as the method sees it.

    Attributes:
        train, test: features (n, d), or images (n, 3, h, w) in uint8.
        features: what extraction took; None for images.
        adapted: the first stage; None where there was none.
        weights: hash of the network that the features come from; None for images.
    """

    train: torch.Tensor
    test: torch.Tensor
    features: Features | None = None
    adapted: Adapted | None = None
    weights: str | None = None


def prepare_inputs(plan: Plan, folder: Path) -> Inputs:
    """Load the images, adapt the network, extract features: whatever the plan needs.

    Args:
        plan: of the run.
        folder: the run's, where an unfinished first stage is kept if there is no cache.
    """
    settings, problem = plan.settings, plan.problem
    if settings.method.trains_network:
        return Inputs(*load_images(plan))
    kept = _cache_folder(plan)
    extractor, adapted = plan.extractor, None
    if extractor is None:
        assert problem.network is not None
        adapted = adapt(plan, lambda: load_images(plan), kept or folder / "checkpoint")
        extractor = NetworkExtractor(adapted.body, problem.network, problem.device)
    cache = None if kept is None else FeatureCache(kept)
    features = extract_features(settings.backbone.name, extractor, plan.dealt.dataset, cache)
    _require_range(features, problem.dtype)
    return Inputs(features.train, features.test, features, adapted, extractor.identity.get("weights"))


def load_images(plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and test images of the data set, at a size that the network can take."""
    assert plan.problem.network is not None
    dataset, size = plan.dealt.dataset, plan.problem.network.size
    train, test = (load_pixels(split, size, what=f"data={dataset.name}") for split in (dataset.train, dataset.test))
    return train, test


def _cache_folder(plan: Plan) -> Path | None:
    """Where features and adapted networks are kept; None where nothing is worth it, or the user wants none."""
    cache = plan.settings.scalars.cache
    worth_it = plan.extractor is None or plan.extractor.cacheable
    return writable(f"cache.dir={cache.dir}", Path(cache.dir).expanduser()) if cache.enabled and worth_it else None


def _require_range(features: Features, dtype: torch.dtype) -> None:
    """Refuse features whose Gram matrix would leave the range of the statistics' type."""
    n, d = features.train.shape
    ends = [end for side in (features.train, features.test) for end in torch.aminmax(side)]
    largest = max(abs(float(end)) for end in ends)
    # 1e6 leaves room for a random projection of any usual width.
    if largest > (torch.finfo(dtype).max / (n * d * 1e6)) ** 0.5:
        raise UserError(
            f"features of size {largest:.3g} overflow statistics in dtype={str(dtype).removeprefix('torch.')}",
            "features of a smaller scale" + (", or dtype=float64" if dtype != torch.float64 else ""),
        )
