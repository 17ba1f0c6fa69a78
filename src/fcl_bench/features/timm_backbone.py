"""Pretrained networks from timm, frozen: by hub name, or from a local checkpoint."""

from __future__ import annotations

import json
import logging
import os
import pickle
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from fcl_bench.data.sources import NOT_IDENTITY, Dataset, Split
from fcl_bench.errors import UserError, choices, first_line, require_choice, require_count
from fcl_bench.features.backbone import Backbone, Extractor, require_images
from fcl_bench.files import content_hash

log = logging.getLogger(__name__)

PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: What torch and safetensors raise for a file that is damaged, of another kind, or holds code instead of tensors.
_LOADING_ERRORS = (
    OSError,
    RuntimeError,
    ValueError,
    LookupError,
    EOFError,
    AttributeError,
    TypeError,
    pickle.UnpicklingError,
    SafetensorError,
)
#: Decoded batches that wait for the network: enough to overlap, few enough to keep memory flat.
BATCHES_AHEAD = 3


@dataclass
class Transform:
    """Preprocessing; what is None comes from the model's own data config.

    Args:
        size: side in pixels of the square that the network sees.
        crop_pct: centre crop as a share of the resized image.
        interpolation: "bicubic", "bilinear", ...
        mean, std: per channel, on pixels scaled to 0..1.
    """

    size: int | None = None
    crop_pct: float | None = None
    interpolation: str | None = None
    mean: list[float] | None = None
    std: list[float] | None = None

    def __post_init__(self) -> None:
        require_count("backbone.transform.size", self.size)
        if self.crop_pct is not None and not 0 < self.crop_pct <= 1:
            raise UserError(f"backbone.transform.crop_pct={self.crop_pct} is out of range", "above 0, at most 1")
        if self.interpolation is not None:
            require_choice(
                "backbone.transform.interpolation",
                self.interpolation,
                ["bicubic", "bilinear", "nearest", "lanczos"],
            )
        for key, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) not in (1, 3):
                raise UserError(f"backbone.transform.{key}={values} has {len(values)} numbers", "one per channel: 3")
        if self.std is not None and min(self.std) <= 0:
            raise UserError(f"backbone.transform.std={self.std} is out of range", "numbers above 0")


@dataclass
class Timm(Backbone):
    """A timm network without its classifier; features are what its classifier would see (`pre_logits`).

    Args:
        name: full `arch.tag` name ("resnet18.tv_in1k"); with a checkpoint the architecture is enough.
        checkpoint: local .safetensors, .pth or .pt file with the weights (no code in it is run); None: the hub's.
        model_args: further arguments of the architecture (`{pad_type: same}`).
        transform: preprocessing where it differs from the model's own.
        precision: auto (float16 autocast on CUDA, float32 elsewhere), float32, float16 or bfloat16.
        batch_size: images per forward pass; None: 256 on CUDA, 4 elsewhere (a CPU's caches hold no more: MobileNetV2
            does 118 images/s at 4 and 57 at 32 on two cores).
        workers: threads that decode and resize; None: one for each core.
    """

    name: str
    checkpoint: str | None = field(default=None, metadata=NOT_IDENTITY)
    model_args: dict[str, Any] = field(default_factory=dict)
    transform: Transform = field(default_factory=Transform)
    precision: str = "auto"
    batch_size: int | None = field(default=None, metadata=NOT_IDENTITY)
    workers: int | None = field(default=None, metadata=NOT_IDENTITY)

    def __post_init__(self) -> None:
        require_choice("backbone.precision", self.precision, ["auto", *PRECISIONS])
        require_count("backbone.batch_size", self.batch_size)
        require_count("backbone.workers", self.workers)
        if self.checkpoint is not None:
            path = Path(self.checkpoint).expanduser()
            if path.suffix not in (".safetensors", ".pth", ".pt"):
                raise UserError(
                    f"backbone.checkpoint={self.checkpoint} is no checkpoint",
                    "a .safetensors, .pth or .pt file",
                )
            if not path.is_file():
                raise UserError(
                    f"backbone.checkpoint={self.checkpoint} does not exist",
                    "a .safetensors, .pth or .pt file",
                )

    def open(self, dataset: Dataset, device: torch.device) -> Extractor:
        require_images(self.name, dataset)
        model = self._model()
        precision = self.precision
        if precision == "auto":
            precision = "float16" if device.type == "cuda" else "float32"
        data_config = self._data_config(model)
        try:
            with torch.inference_mode():
                dimension = model.eval()(torch.zeros(1, *data_config["input_size"])).shape[1]
        except (AssertionError, RuntimeError, ValueError) as error:
            raise UserError(
                f"{self.name} does not take images of {data_config['input_size'][1:]}: {first_line(error)}",
                "another backbone.transform.size, or +backbone.model_args.img_size=SIZE for a ViT",
            ) from error
        return _TimmExtractor(self, model, data_config, dimension, precision, device)

    def _model(self) -> torch.nn.Module:
        """The network with its weights, still on the CPU."""
        import timm

        architecture, _, tag = self.name.partition(".")
        if not timm.is_model(architecture):
            raise UserError(
                f"backbone.name={self.name}: timm has no {architecture}",
                choices(timm.list_models(), architecture),
            )
        if self.checkpoint is not None:
            model = self._create(pretrained=False)
            self._load_checkpoint(model)
            return model
        tagged = [name for name in timm.list_pretrained() if name.partition(".")[0] == architecture]
        if not tag or self.name not in tagged:
            what = "names no weights" if not tag else f"timm has no weights {tag} for {architecture}"
            raise UserError(
                f"backbone.name={self.name} {what}",
                f"backbone.checkpoint=FILE, or a name: {choices(tagged, self.name)}",
            )
        log.info("weights %s: from the hub, or its cache on this machine", self.name)
        return self._create(pretrained=True)

    def _create(self, pretrained: bool) -> torch.nn.Module:
        import timm

        try:
            return timm.create_model(self.name, pretrained=pretrained, num_classes=0, **self.model_args)
        except (TypeError, LookupError, ValueError, AssertionError, AttributeError) as error:
            if not self.model_args:
                raise
            raise UserError(
                f"backbone.model_args={self.model_args} failed ({type(error).__name__}: {first_line(error)})",
                f"arguments of timm's {self.name}",
            ) from error
        except (OSError, RuntimeError) as error:
            if not pretrained:
                raise
            raise UserError(
                f"backbone.name={self.name}: weights could not be fetched from the hub: {first_line(error)}",
                "backbone.checkpoint=FILE with those weights, or a machine with network to fill the hub's cache",
            ) from error

    def _load_checkpoint(self, model: torch.nn.Module) -> None:
        """Load the file strictly, the classifier apart: features don't need it."""
        from timm.models import load_state_dict

        key = f"backbone.checkpoint={self.checkpoint}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                path = str(Path(self.checkpoint or "").expanduser())
                state = load_state_dict(path, device="cpu", weights_only=True)
        except _LOADING_ERRORS as error:
            # Not the library's own advice: for a pickle it is to load it unsafely.
            raise UserError(
                f"{key} cannot be loaded ({type(error).__name__})", "an undamaged state dict that holds only tensors"
            ) from error
        if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise UserError(f"{key} holds no state dict", "a flat mapping of names to tensors")
        classifier = model.pretrained_cfg.get("classifier") or ()  # type: ignore[union-attr, operator]
        heads = (classifier,) if isinstance(classifier, str) else tuple(classifier)
        state = {
            name: value for name, value in state.items() if not name.startswith(tuple(f"{head}." for head in heads))
        }
        wanted = model.state_dict()
        for trouble, names in (
            ("lacks", wanted.keys() - state.keys()),
            ("has the unexpected", state.keys() - wanted.keys()),
        ):
            if names:
                raise UserError(
                    f"{key} {trouble} {min(names)} ({len(names)} such entries) for {self.name}",
                    "weights of exactly this architecture; see backbone.name and backbone.model_args",
                )
        for name, value in state.items():
            if value.shape != wanted[name].shape:
                raise UserError(
                    f"{key}: {name} has shape {tuple(value.shape)}, {self.name} needs {tuple(wanted[name].shape)}",
                    "weights of exactly this architecture; see backbone.name and backbone.model_args",
                )
        model.load_state_dict(state, strict=True)

    def _data_config(self, model: torch.nn.Module) -> dict[str, Any]:
        """timm's data config of the model with `transform` laid over it."""
        from timm.data import resolve_model_data_config

        config = resolve_model_data_config(model)
        own = self.transform
        if own.size is not None:
            config["input_size"] = (3, own.size, own.size)
        for name in ("crop_pct", "interpolation"):
            if getattr(own, name) is not None:
                config[name] = getattr(own, name)
        for name in ("mean", "std"):
            if (values := getattr(own, name)) is not None:
                config[name] = tuple(values) * (3 // len(values))
        return config


def available_cores() -> int:
    """Cores that this process may use (a cluster's job has fewer than its machine)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def weights_hash(model: torch.nn.Module) -> str:
    """Hash of all parameters and buffers with their names, whatever file they came from."""
    digest = content_hash()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class _TimmExtractor(Extractor):
    def __init__(
        self,
        backbone: Timm,
        model: torch.nn.Module,
        data_config: dict[str, Any],
        dimension: int,
        precision: str,
        device: torch.device,
    ) -> None:
        from timm.data import create_transform

        self.cacheable = True
        self.identity = {
            "backbone": backbone.name.partition(".")[0],
            "model_args": json.dumps(backbone.model_args, sort_keys=True),
            "weights": weights_hash(model),
            "transform": json.dumps(data_config, sort_keys=True, default=str),
            "precision": precision,
            "device": device.type,
        }
        self._dimension = dimension
        self._device = device
        self._dtype = PRECISIONS[precision]
        # Convolutions run faster with channels last; a network without them (a ViT) does not care.
        layout = torch.channels_last
        self._model = model.eval().requires_grad_(False).to(device, memory_format=layout)  # type: ignore[call-overload]
        # The threads decode and resize to uint8; scaling happens on the device, in whole batches.
        self._transform = create_transform(**data_config, is_training=False, use_prefetcher=True)
        self._mean = torch.tensor(data_config["mean"], device=device).view(1, 3, 1, 1)
        self._std = torch.tensor(data_config["std"], device=device).view(1, 3, 1, 1)
        self._batch_size = backbone.batch_size or (256 if device.type == "cuda" else 4)
        self._workers = backbone.workers or available_cores()

    def dimension(self, split: Split) -> int:
        return self._dimension

    def batches(self, split: Split, start: int = 0) -> Iterator[torch.Tensor]:
        # float32 means float32: TF32 would make a GPU's features differ from a CPU's in the third digit.
        # And the same command must give the same features, so no autotuning of algorithms either.
        flags = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
        with torch.inference_mode(), flags:
            for pixels in self._pixels(split, start):
                images = torch.from_numpy(pixels).to(self._device, non_blocking=True)
                images = images.to(torch.float32).div_(255).sub_(self._mean).div_(self._std)
                with self._autocast():
                    features = self._model(images.contiguous(memory_format=torch.channels_last))
                yield features.to("cpu", torch.float32)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, self._dtype)

    def _pixels(self, split: Split, start: int) -> Iterator[np.ndarray]:
        """uint8 batches (b, 3, size, size), decoded ahead of the network by threads."""

        def load(index: int) -> np.ndarray:
            return self._transform(split.inputs[index].convert("RGB"))

        with ThreadPoolExecutor(self._workers) as pool:
            waiting: deque[list[Future[np.ndarray]]] = deque()
            try:
                for begin in range(start, len(split), self._batch_size):
                    batch = range(begin, min(begin + self._batch_size, len(split)))
                    waiting.append([pool.submit(load, index) for index in batch])
                    if len(waiting) > BATCHES_AHEAD:
                        yield np.stack([future.result() for future in waiting.popleft()])
                while waiting:
                    yield np.stack([future.result() for future in waiting.popleft()])
            finally:
                # An error or an interrupt must not wait for images that nobody will look at.
                pool.shutdown(wait=False, cancel_futures=True)
