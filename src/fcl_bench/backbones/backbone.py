"""What `backbone=...` names, and the two that need no network: pixels and identity."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from fcl_bench.config import knob
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import Dataset, Split
from fcl_bench.errors import UserError
from fcl_bench.files import content_hash

#: Of the frozen pass, besides auto.
PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Trainable:
    """A body (a network without classifier) to be trained, and the images it takes.

    Attributes:
        build: a new body on the CPU in train mode, with the same weights at every call. It maps standardised float32
            images (b, 3, size, size) to features (b, d); parameters that stay as they are do not require gradients.
        dimension: d.
        size: side of the square images in pixels.
        mean, std: per channel, on pixels scaled to 0..1; images are standardised by them.
        stages: names of sub-modules in forward order, each with parameters of its own, which a method may freeze from
            the front (see `frozen_names`); empty for a network that names none.
        identity: everything besides the data that determines the body (initial weights' hash, size, mean, std, ...).
        compiled: whether the body is to run compiled (see `compile_body`); `build` returns it as written.
    """

    name: str
    build: Callable[[], torch.nn.Module]
    dimension: int
    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    stages: tuple[str, ...]
    identity: dict[str, str]
    compiled: bool = False

    @classmethod
    def of(
        cls,
        body: torch.nn.Module,
        made_of: dict[str, str],
        *,
        name: str,
        dimension: int,
        size: int,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        stages: tuple[str, ...] = (),
        compiled: bool = False,
    ) -> Trainable:
        """Copies of `body`, which the caller must not use any more.

        Args:
            made_of: what determines the body besides its weights, size, mean, std and compiler.
        """
        identity = {**made_of, "weights": weights_hash(body), "size": str(size)}
        identity |= {"mean": json.dumps(mean), "std": json.dumps(std), **({"compiled": "true"} if compiled else {})}
        return cls(name, copies(body), dimension, size, mean, std, stages, identity, compiled)


def copies(body: torch.nn.Module) -> Callable[[], torch.nn.Module]:
    """A `Trainable.build` that returns copies of `body`; the caller must not use `body` any more."""
    return lambda: copy.deepcopy(body).train()


def frozen_names(body: torch.nn.Module, stages: tuple[str, ...], count: int) -> set[str]:
    """Names of the parameters and buffers of the first `count` stages, and of everything registered before them.

    So the stem belongs to the first stage. A buffer is named whether or not the state dict holds it.

    Raises:
        UserError: there are fewer than `count` stages.
    """
    if count > len(stages):
        raise UserError(
            f"method.frozen_stages={count} is more than the network has",
            f"at most {len(stages)}: {', '.join(stages)}" if stages else "0: it names no stages",
        )
    if count == 0:
        return set()
    last, reached = stages[count - 1], False
    names = set()
    for path, module in body.named_modules():
        inside = path == last or path.startswith(f"{last}.")
        if reached and not inside:
            break
        reached |= inside
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        names |= {f"{path}.{name}" if path else name for name, _ in own}
    return names


def weights_hash(model: torch.nn.Module) -> str:
    """Hash of all parameters and buffers with their names, independent of the file they came from."""
    digest = content_hash()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Extractor(ABC):
    """A frozen map from samples to features, opened on one device.

    Attributes:
        identity: everything besides the data that determines the features (weights' hash, transform, precision).
        cacheable: whether computing the features costs more than reading them back.
        batch: samples per forward pass, if that number may change bits; a pass that begins at any multiple of it gives
            the same features as a whole pass. None: the number does not matter.
    """

    identity: dict[str, str]
    cacheable = False
    batch: int | None = None

    def dimension(self, split: Split) -> int:
        """d, the number of features of a sample."""
        return next(iter(self.batches(split))).shape[1]

    @abstractmethod
    def batches(self, split: Split, start: int = 0) -> Iterator[torch.Tensor]:
        """Features (b, d) on the CPU of samples start, start + 1, ..., batch by batch, in order."""


class Backbone(ABC):
    """What `backbone=...` names: typed knobs, opened once the data and the device are known."""

    name: str

    @property
    def draws_weights(self) -> bool:
        """Whether some of the initial weights are random, so that they differ between seeds of one configuration."""
        return False

    def without_weights(self) -> dict[str, Any]:
        """The knobs for the same network with arbitrary weights, for callers that load other weights into it."""
        return {}

    @abstractmethod
    def open(self, dataset: Dataset, device: torch.device, seed: int = 0) -> Extractor:
        """Load the weights; random ones are drawn with `seed`. Raises a `UserError`: backbone and data don't fit."""

    def trainable(self, dataset: Dataset, seed: int) -> Trainable:
        """The network for training on the images of `dataset`; random initial weights are drawn with `seed`.

        Raises:
            UserError: the backbone has nothing to train, or backbone and data don't fit.
        """
        on_features = "method.trains=features where the method has it, or method=stsa and the like; adapt=none"
        networks = "backbone=resnet18_cifar, tiny, or another network"
        remedy = networks if dataset.kind == "images" else on_features
        raise UserError(f"backbone={self.name} has nothing to train", remedy)


def require_kind(kind: str, backbone: str, dataset: Dataset) -> None:
    """Raise a `UserError` unless the data set holds what the backbone takes: images, features or texts."""
    if dataset.kind != kind:
        suits = {
            "images": "backbone=pixels or a network such as backbone=resnet18",
            "features": "backbone=identity",
            "texts": "backbone=sentence",
        }
        needs = "ready features" if kind == "features" else kind
        found = f"backbone={backbone} needs {needs} and data={dataset.name} holds {dataset.kind}"
        raise UserError(found, suits[dataset.kind])


@dataclass
class Identity(Backbone):
    """The inputs are features already (`data=features`)."""

    name: ClassVar[str] = "identity"  # type: ignore[misc]  # a network's name is a knob, this one is not

    def open(self, dataset: Dataset, device: torch.device, seed: int = 0) -> Extractor:
        require_kind("features", self.name, dataset)
        return _IdentityExtractor()


class _IdentityExtractor(Extractor):
    def __init__(self) -> None:
        self.identity = {"backbone": "identity"}

    def batches(self, split: Split, start: int = 0) -> Iterator[torch.Tensor]:
        assert isinstance(split.inputs, np.ndarray)
        yield torch.from_numpy(np.ascontiguousarray(split.inputs[start:]))


@dataclass
class Pixels(Backbone):
    """The image itself: flattened, scaled to 0..1."""

    name: ClassVar[str] = "pixels"  # type: ignore[misc]  # a network's name is a knob, this one is not
    size: int | None = knob(None, least=1)

    def open(self, dataset: Dataset, device: torch.device, seed: int = 0) -> Extractor:
        require_kind("images", self.name, dataset)
        return _PixelExtractor(self.size)


class _PixelExtractor(Extractor):
    BATCH = 1024

    def __init__(self, size: int | None) -> None:
        self.identity = {"backbone": "pixels", "size": str(size)}
        self._size = size

    def dimension(self, split: Split) -> int:
        return self._pixels(split, 0).size

    def batches(self, split: Split, start: int = 0) -> Iterator[torch.Tensor]:
        assert not isinstance(split.inputs, np.ndarray)
        if self._size is None and isinstance(split.inputs, ArrayImages) and split.inputs.pixels.shape[3:] in ((), (3,)):
            # Opened one by one, the digits take half of a short run's time.
            left = torch.from_numpy(split.inputs.pixels[start:]).flatten(1)
            yield from (batch.to(torch.float32) / 255 for batch in left.split(self.BATCH))
            return
        shape: tuple[int, ...] | None = None
        for begin in range(start, len(split), self.BATCH):
            rows = []
            for index in range(begin, min(begin + self.BATCH, len(split))):
                pixels = self._pixels(split, index)
                shape = shape or pixels.shape
                if pixels.shape != shape:
                    raise UserError(
                        f"backbone=pixels: {split.inputs.describe(index)} has shape {pixels.shape}, others {shape}",
                        "backbone.size=32 resizes them all",
                    )
                rows.append(pixels.reshape(-1))
            yield torch.from_numpy(np.stack(rows)).to(torch.float32) / 255

    def _pixels(self, split: Split, index: int) -> np.ndarray:
        from PIL import Image

        image = split.inputs[index]
        assert isinstance(image, Image.Image)
        if self._size is not None:
            image = image.convert("RGB").resize((self._size, self._size), Image.Resampling.BICUBIC)
        elif image.mode not in ("L", "RGB"):
            image = image.convert("RGB")
        return np.asarray(image)
