"""A network that methods train: how to build it, always with the same initial weights, and its properties."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fcl_bench.errors import UserError
from fcl_bench.files import content_hash


@dataclass(frozen=True)
class Trainable:
    """A body (a network without classifier) to be trained, and the images it takes.

    Attributes:
        name: of the backbone.
        build: a new body on the CPU in train mode, with the same weights at every call. It maps standardised float32
            images (b, 3, size, size) to features (b, d); parameters that stay as they are do not require gradients.
        dimension: d.
        size: side of the square images in pixels.
        mean, std: per channel, on pixels scaled to 0..1; images are standardised by them.
        stages: names of sub-modules in forward order, each with parameters of its own, which a method may freeze from
            the front (see `frozen_names`); empty for a network that names none.
        identity: everything besides the data that determines the body (initial weights' hash, size, mean, std, ...).
        compiled: whether the body is to run compiled (`backbones.compiled`); `build` returns it as written.
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
