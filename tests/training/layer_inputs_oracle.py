"""What the tests of layers' inputs share: small networks, and every column of a layer, from hooks of our own."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fcl_bench.backbones.backbone import Trainable, copies
from fcl_bench.backbones.timm_backbone import Adapters, Timm, Transform
from fcl_bench.data.images.batches import Standardise
from fcl_bench.data.images.stored import ArrayImages
from fcl_bench.data.sources.base import Dataset, image_split
from fcl_bench.training.knobs import Training
from fcl_bench.training.layer_inputs import HEADS, layer_columns, projectable
from fcl_bench.training.network import Network
from fcl_bench.training.trainer import Trainer
from tests.methods.training_harness import CPU


def images_of(count: int, size: int = 8, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, 256, (count, 3, size, size), dtype=np.uint8))


def network_and_trainer(start: Trainable, seed: int = 0) -> tuple[Network, Trainer]:
    """The network after something like training: batch norms with statistics of their own."""
    network = Network(start)
    rng = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.running_var):
                tensor.data.uniform_(0.5, 2, generator=rng)
            for tensor in (module.bias, module.running_mean):
                tensor.data.uniform_(-1, 1, generator=rng)
    return network, Trainer(Training(augment="none"), Standardise(start.size, start.mean, start.std), CPU)


def made_of(body: nn.Module, size: int = 8, dimension: int = 6) -> Trainable:
    return Trainable("made", copies(body), dimension, size, (0.5,) * 3, (0.25,) * 3, (), {})


def true_columns(network: Network, trainer: Trainer, images: torch.Tensor, names: list[str]) -> dict[str, torch.Tensor]:
    """Every column (n, d, places) of the layers, from hooks of our own; all images at once."""
    seen: dict[str, torch.Tensor] = {}
    modules = {f"body.{name}": module for name, module in network.body.named_modules()}

    def keep(name):
        def hook(module, inputs, output):
            seen[name] = inputs[0].detach().clone()

        return hook

    handles = [modules[name].register_forward_hook(keep(name)) for name in names if name != HEADS]
    network.eval()
    with torch.no_grad():
        seen[HEADS] = network.body(trainer.standardise(images))
    for handle in handles:
        handle.remove()
    found = {}
    for name in names:
        inputs, module = seen[name], modules.get(name)
        if isinstance(module, nn.Conv2d):
            columns = F.unfold(inputs, module.kernel_size, module.dilation, module.padding, module.stride)
        else:
            columns = inputs.reshape(len(images), -1, inputs.shape[-1]).transpose(1, 2)
        found[name] = columns
    return found


def as_counter(columns: torch.Tensor) -> Counter[bytes]:
    return Counter(column.numpy().tobytes() for column in columns.T.contiguous())


def chosen_from(
    network: Network, trainer: Trainer, images: torch.Tensor, count: int, seed: int = 0, layers: list[str] | None = None
) -> dict[str, torch.Tensor]:
    layers = [*projectable(network), HEADS] if layers is None else layers
    return layer_columns(trainer, network, images, layers, count, torch.Generator().manual_seed(seed))


def timm_start(name: str, size: int = 32, **knobs) -> Trainable:
    split = image_split([0, 1], ArrayImages(np.zeros((2, size, size, 3), dtype=np.uint8)))
    backbone = Timm(name, pretrained=False, **{"transform": Transform(size=size), **knobs})
    return backbone.trainable(Dataset("made", split, split), 0)


#: A ViT of timm's own tests at a size that it takes, with and without adapters.
VITS = {
    "vit": {"model_args": {"img_size": 32, "patch_size": 8}},
    "vit with adapters": {"model_args": {"img_size": 32, "patch_size": 8}, "adapters": Adapters(8)},
}
