"""Networks from timm: by hub name, from a local checkpoint, or from scratch; frozen, trainable, or with adapters."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import dropout

from fcl_bench.backbones.backbone import PRECISIONS, Backbone, Extractor, Trainable, require_kind
from fcl_bench.backbones.network_extractor import TimmExtractor
from fcl_bench.backbones.timm_weights import load_weights, read_checkpoint, timm_network
from fcl_bench.config import counting, knob
from fcl_bench.data.sources.base import Dataset
from fcl_bench.errors import UserError, first_line
from fcl_bench.files import special, user_path
from fcl_bench.randomness import derived_seed, seeded

log = logging.getLogger(__name__)


@dataclass
class Transform:
    """Preprocessing; values that are None come from the model's own data config."""

    size: int | None = knob(None, least=1)
    crop_pct: float | None = knob(None, above=0, most=1)
    interpolation: str | None = knob(None, choices=("bicubic", "bilinear", "nearest", "lanczos"))
    mean: list[float] | None = None
    std: list[float] | None = None

    def __post_init__(self) -> None:
        for key, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) not in (1, 3):
                raise UserError(f"backbone.transform.{key}={values} has {len(values)} numbers", "one per channel: 3")
        if self.std is not None and min(self.std) <= 0:
            raise UserError(f"backbone.transform.std={self.std} is out of range", "numbers above 0")

    def over(self, config: dict[str, Any]) -> dict[str, Any]:
        """timm's data config of a model, overridden by the values set here."""
        own: dict[str, Any] = {
            "input_size": self.size and (3, self.size, self.size),
            "crop_pct": self.crop_pct,
            "interpolation": self.interpolation,
            "mean": self.mean and tuple(self.mean) * (3 // len(self.mean)),
            "std": self.std and tuple(self.std) * (3 // len(self.std)),
        }
        return {**config, **{name: value for name, value in own.items() if value is not None}}


@dataclass
class Timm(Backbone):
    """A timm network without its classifier; features are what its classifier would see (`pre_logits`)."""

    name: str = knob(filled=True, words="backbone.name=resnet18.tv_in1k")
    pretrained: bool = True
    checkpoint: str | None = knob(None, identity=False)
    model_args: dict[str, Any] = field(default_factory=dict)
    stem: str = knob("own", choices=("own", "cifar"))
    pool: int = knob(1, least=1)
    adapters: Adapters | None = None
    transform: Transform = field(default_factory=Transform)
    precision: str = knob("auto", choices=("auto", *PRECISIONS))
    compile: bool = knob(False)

    def __post_init__(self) -> None:
        if self.checkpoint is not None:
            key = f"backbone.checkpoint={self.checkpoint}"
            path = user_path("backbone.checkpoint", self.checkpoint)
            if path.suffix not in (".safetensors", ".pth", ".pt"):
                raise UserError(f"{key} is no checkpoint", "a .safetensors, .pth or .pt file")
            if not path.is_file():
                found = special(path)
                trouble = f"is {found}" if found else "does not exist"
                raise UserError(f"{key} {trouble}", "a .safetensors, .pth or .pt file")
            if not self.pretrained:
                raise UserError(f"{key} would not be read: backbone.pretrained=false", "one of the two")

    @property
    def draws_weights(self) -> bool:
        return not self.pretrained or self.stem == "cifar" or self.adapters is not None

    def without_weights(self) -> dict[str, Any]:
        return {"pretrained": False, "checkpoint": None}

    def open(self, dataset: Dataset, device: torch.device, seed: int = 0) -> Extractor:
        require_kind("images", self.name, dataset)
        model = self._network(seed)
        config = self._data_config(model)
        if not self.pretrained:
            log.warning("backbone.pretrained=false: the features are those of %s with random weights", self.name)
        # Included only if they differ from the plain network's, so that its cached features stay valid.
        plain = {"stem": "own", "adapters": "null"}
        made_of = {key: value for key, value in self._made_of().items() if plain.get(key) != value}
        dimension = self._dimension(model, config)
        return TimmExtractor(model, dimension, made_of, config, self.precision, device, self.compile)

    def trainable(self, dataset: Dataset, seed: int) -> Trainable:
        """The network for training on whole images of `transform.size` (None: the model's own size)."""
        require_kind("images", self.name, dataset)
        model = self._network(seed)
        config = self._data_config(model)
        return Trainable.of(
            model,
            self._made_of(),
            name=self.name,
            dimension=self._dimension(model, config),
            size=config["input_size"][-1],
            mean=config["mean"],
            std=config["std"],
            stages=_stages(model),
            compiled=self.compile,
        )

    def _made_of(self) -> dict[str, str]:
        return {
            "backbone": self.name.partition(".")[0],
            "model_args": json.dumps(self.model_args, sort_keys=True),
            "stem": self.stem,
            # Left out where it changes nothing: the reference tables in results/ hold fingerprints of such features.
            **({"pool": str(self.pool)} if self.pool > 1 else {}),
            "adapters": json.dumps(self.adapters and counting(self.adapters), sort_keys=True),
        }

    def _network(self, seed: int) -> nn.Module:
        """The network with its weights, on the CPU; random weights are drawn with `seed`."""
        # timm draws weights even if others replace them; these draws must not change the caller's generator.
        with seeded(derived_seed(seed, "network")):
            model = timm_network(self.name, self.model_args, pretrained=self.pretrained and self.checkpoint is None)
        state = None if self.checkpoint is None else read_checkpoint(self.checkpoint)
        stem = None
        if self.stem == "cifar":
            with seeded(derived_seed(seed, "stem")):
                stem = _cifar_stem(model, self.name)
            # A checkpoint whose first weights have this shape was made with such a stem.
            if state is not None and "conv1.weight" in state and state["conv1.weight"].shape == stem.weight.shape:
                _put_stem(model, stem)
                stem = None
        if state is not None:
            load_weights(model, state, self.name, str(self.checkpoint))
        if stem is not None:
            _put_stem(model, stem)
            if self.pretrained:
                log.warning("backbone.stem=cifar: the stem of %s is new, with random weights", self.name)
        if self.pool > 1:
            _put_pool(model, self.pool, self.name)
        if self.adapters is not None:
            with seeded(derived_seed(seed, "adapters")):
                add_adapters(model, self.adapters, self.name)
        return model

    def _data_config(self, model: nn.Module) -> dict[str, Any]:
        from timm.data import resolve_model_data_config

        return self.transform.over(resolve_model_data_config(model))

    def _dimension(self, model: nn.Module, config: dict[str, Any]) -> int:
        """d, found by a forward pass; the model is left in train mode."""
        image = torch.zeros(1, *config["input_size"])
        try:
            with torch.no_grad():
                features = model.eval()(image)
        except (AssertionError, RuntimeError, ValueError) as error:
            raise UserError(
                f"{self.name} does not take images of {config['input_size'][1:]}: {first_line(error)}",
                "another backbone.transform.size, or +backbone.model_args.img_size=SIZE for a ViT",
            ) from error
        if self.pool > 1:
            with torch.no_grad():
                rows, columns = model.forward_features(image).shape[-2:]  # type: ignore[operator]
            if min(rows, columns) < self.pool:
                raise UserError(
                    f"backbone.pool={self.pool} is more than the last map of {self.name} has: {rows} x {columns}",
                    f"at most {min(rows, columns)}, larger images (backbone.transform.size) or backbone.stem=cifar",
                )
        model.train()
        return features.shape[1]


def _stages(model: nn.Module) -> tuple[str, ...]:
    """The modules that timm lists as the network's feature levels, those without parameters left out."""
    modules = dict(model.named_modules())
    listed = [entry.get("module") for entry in getattr(model, "feature_info", None) or ()]
    owning = [name for name in listed if name in modules and any(True for _ in modules[name].parameters())]
    return tuple(dict.fromkeys(owning))


def _cifar_stem(model: nn.Module, name: str) -> nn.Conv2d:
    """The stem that the literature gives a ResNet for images of 32 pixels: a 3x3 convolution of stride 1.

    It replaces the first convolution and pooling of `model` (see `_put_stem`). Its weights are drawn from torch's
    generator, as timm draws the convolutions of a ResNet.

    Raises:
        UserError: the network is not a ResNet.
    """
    first = getattr(model, "conv1", None)
    convolutions = [m for m in first.modules() if isinstance(m, nn.Conv2d)] if isinstance(first, nn.Module) else []
    if not convolutions or not isinstance(getattr(model, "maxpool", None), nn.Module):
        raise UserError(f"backbone.stem=cifar: {name} has no conv1 and maxpool", "a ResNet, or backbone.stem=own")
    # A deep stem is several convolutions; the last one's channels are what the rest of the network takes.
    stem = nn.Conv2d(3, convolutions[-1].out_channels, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    return stem


def _put_stem(model: nn.Module, stem: nn.Conv2d) -> None:
    """Replace `model`'s first convolution by `stem`, and its pooling by the identity."""
    model.conv1, model.maxpool = stem, nn.Identity()


def _put_pool(model: nn.Module, side: int, name: str) -> None:
    """Average the last feature map of `model` to side x side cells rather than to one.

    Raises:
        UserError: the network has no global pooling of a feature map at its end.
    """
    from timm.layers import SelectAdaptivePool2d

    if not isinstance(getattr(model, "global_pool", None), SelectAdaptivePool2d):
        raise UserError(f"backbone.pool={side}: {name} has no global_pool of a feature map", "a ResNet, or pool=1")
    model.global_pool = SelectAdaptivePool2d(output_size=side, pool_type="avg", flatten=True)


@dataclass
class Adapters:
    """`backbone.adapters`: see conf/backbone/vit_b16_stsa.yaml; Eq. 63 has neither biases nor dropout."""

    width: int = knob(64, least=1)
    scale: float = knob(0.1, above=0)
    bias: bool = knob(True)
    reads: str = knob("normalised", choices=("normalised", "stream"))
    dropout: float = knob(0.0, least=0, below=1)


class AdaptedMlp(nn.Module):
    """x_o = MLP(x_i) + s ReLU(x_i W_down) W_up (STSA Eq. 63), x_i (..., d) being the input of a block's MLP.

    W_up is zero at first, so that the network starts as the plain one; W_down is drawn from torch's generator.

    Args:
        dimension: d.
        norm: the layer norm applied to the MLP's input but not to the adapter's; None: no such norm.
    """

    def __init__(self, mlp: nn.Module, dimension: int, adapters: Adapters, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.Identity() if norm is None else norm
        self.mlp = mlp
        self.down = nn.Linear(dimension, adapters.width, bias=adapters.bias)
        self.up = nn.Linear(adapters.width, dimension, bias=adapters.bias)
        self.scale, self.dropout = adapters.scale, adapters.dropout
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            if zero is not None:
                nn.init.zeros_(zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        units = torch.relu(self.down(x))
        if self.dropout:
            units = dropout(units, self.dropout, self.training)
        return self.mlp(self.norm(x)) + self.scale * self.up(units)


def add_adapters(model: nn.Module, adapters: Adapters, name: str) -> None:
    """Put an adapter into every block of `model`; from then on only the adapters require gradients.

    Raises:
        UserError: the network has no blocks with an MLP, or no norm before the MLP where the adapter has to bypass it.
    """
    blocks = getattr(model, "blocks", None)
    blocks = list(blocks) if isinstance(blocks, (nn.Sequential, nn.ModuleList)) else []
    dimensions = [dimension for block in blocks if (dimension := _input_dimension(getattr(block, "mlp", None)))]
    if not blocks or len(dimensions) < len(blocks):
        raise UserError(
            f"backbone.adapters: {name} has no blocks with an MLP to adapt",
            "a ViT, such as backbone=vit_b16_adapters, or backbone.adapters=null",
        )
    before_norm = adapters.reads == "stream"
    if before_norm and not all(isinstance(getattr(block, "norm2", None), nn.Module) for block in blocks):
        raise UserError(
            f"backbone.adapters.reads=stream: {name} has no norm2 before its MLPs",
            "a ViT, or backbone.adapters.reads=normalised",
        )
    model.requires_grad_(False)
    for block, dimension in zip(blocks, dimensions, strict=True):
        block.mlp = AdaptedMlp(block.mlp, dimension, adapters, block.norm2 if before_norm else None)
        if before_norm:
            block.norm2 = nn.Identity()


def _input_dimension(mlp: object) -> int | None:
    """d of an MLP, from its first linear layer."""
    if not isinstance(mlp, nn.Module):
        return None
    return next((layer.in_features for layer in mlp.modules() if isinstance(layer, nn.Linear)), None)
