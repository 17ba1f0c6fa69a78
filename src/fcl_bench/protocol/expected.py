"""What a server expects of an upload. The engine checks every upload against it; nothing else is absorbed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

#: The length of a side of a tensor: a number, or a name for a length that the sender chooses. The same name means the
#: same length wherever it stands in one upload.
Side = int | str


@dataclass(frozen=True)
class Expected:
    """One tensor of an upload.

    Attributes:
        shape: its sides.
        kind: "real" (floating point, finite), "whole" (integers), or "bytes" (uint8).
        least: no value is below it; None: no bound.
        below: every value is below it; None: no bound.
        optional: whether the upload may come without it.
    """

    shape: tuple[Side, ...]
    kind: str = "real"
    least: int | None = None
    below: int | None = None
    optional: bool = False


Expectation = Mapping[str, Expected]


def real(*shape: Side, least: int | None = None, optional: bool = False) -> Expected:
    """Finite floating-point numbers."""
    return Expected(shape, "real", least, None, optional)


def counts(*shape: Side, optional: bool = False) -> Expected:
    """Whole numbers, 0 or more."""
    return Expected(shape, "whole", 0, None, optional)


def numbers(*shape: Side, below: int, optional: bool = False) -> Expected:
    """Numbers of classes, tasks and the like: 0 to `below` - 1."""
    return Expected(shape, "whole", 0, below, optional)


def images(*shape: Side) -> Expected:
    """Pixels in uint8."""
    return Expected(shape, "bytes")


def like(tensors: Mapping[str, torch.Tensor]) -> dict[str, Expected]:
    """Real tensors with the names and shapes of these."""
    return {name: real(*tensor.shape) for name, tensor in tensors.items()}
