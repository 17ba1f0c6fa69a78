"""Named tensors in one buffer, so that one operation looks at all of them, or changes the type of all of them."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeGuard

import torch


class _Part(NamedTuple):
    """Where a tensor lies in the buffer."""

    name: str
    shape: torch.Size
    strides: tuple[int, ...]
    begin: int


class Flat(Mapping[str, torch.Tensor]):
    """Named tensors that lie one after the other in one buffer, with nothing between them.

    A network of a few tens of short tensors is looked at, or converted, tensor by tensor in a time in which a client
    with few samples takes a tenth of its step; as one buffer it takes almost none.

    Args:
        buffer: (m,) all their numbers.
        parts: where each lies.
    """

    def __init__(self, buffer: torch.Tensor, parts: Sequence[_Part]) -> None:
        self.buffer = buffer
        self._parts = parts
        pieces = buffer.split([part.shape.numel() for part in parts]) if parts else ()
        # Most tensors of a network are vectors, and need no other view.
        self._tensors = {
            part.name: piece if len(part.shape) == 1 else piece.as_strided(part.shape, part.strides)
            for part, piece in zip(parts, pieces, strict=True)
        }

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Flat:
        """Copies of tensors of one type on one device; channels stay last where they are.

        Raises:
            ValueError: they are of several types.
        """
        parts, end = [], 0
        for name, tensor in tensors.items():
            parts.append(_Part(name, tensor.shape, _strides(tensor), end))
            end += tensor.numel()
        values = list(tensors.values())
        if len({tensor.dtype for tensor in values}) > 1:
            raise ValueError("tensors of several types cannot lie in one buffer")
        flat = cls(values[0].new_empty(end) if values else torch.empty(0), parts)
        if values:
            torch._foreach_copy_(list(flat._tensors.values()), values)
        return flat

    def add_(self, other: Flat, factor: float) -> None:
        """Add `factor` times the same tensors in the same places."""
        self.buffer.add_(other.buffer, alpha=factor)

    def times(self, factor: float) -> Flat:
        """`factor` times these tensors."""
        return Flat(self.buffer * factor, self._parts)

    def same_places(self, tensors: Mapping[str, torch.Tensor]) -> TypeGuard[Flat]:
        """Whether tensors lie in a buffer of theirs where these lie in this one."""
        return isinstance(tensors, Flat) and tensors._parts == self._parts

    def to(self, device: torch.device | None, dtype: torch.dtype | None) -> Flat:
        """The same numbers in another type and elsewhere; None: those that they have."""
        buffer = self.buffer.to(device=device, dtype=dtype)
        return self if buffer is self.buffer else Flat(buffer, self._parts)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    # As in a dictionary; `Mapping`'s own versions look tensors up name by name.
    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def items(self) -> ItemsView[str, torch.Tensor]:
        return self._tensors.items()


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides without gaps: the tensor's own if it has none; as a convolution has them, or in order of the sides."""
    if tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def pieces(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """What holds all numbers of these tensors, and nothing else, in as few tensors as they have."""
    return [tensors.buffer] if isinstance(tensors, Flat) else list(tensors.values())
