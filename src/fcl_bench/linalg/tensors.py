"""Many named tensors at once: in one buffer, their sums and means, and whether all are finite."""

from __future__ import annotations

from cmath import isfinite
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

#: Tensor size up to which copying takes less time than a separate sum.
_SMALL = 4096
#: Rows per block when a matrix is searched for what is not finite.
_ROWS = 4096


class _Part(NamedTuple):
    """Where a tensor lies in the buffer."""

    name: str
    shape: torch.Size
    strides: tuple[int, ...]
    begin: int


class Flat(dict[str, torch.Tensor]):
    """Named tensors that lie one after the other in one buffer, with nothing between them.

    A network of a few tens of short tensors is looked at, or converted, tensor by tensor in a time in which a client
    with few samples takes a tenth of its step; as one buffer it takes almost none.

    Args:
        buffer: (m,) all their numbers.
    """

    def __init__(self, buffer: torch.Tensor, parts: Sequence[_Part]) -> None:
        self.buffer = buffer
        self._parts = parts
        pieces = buffer.split([part.shape.numel() for part in parts]) if parts else ()
        super().__init__()
        for part, piece in zip(parts, pieces, strict=True):
            # Most tensors of a network are vectors, and need no other view.
            self[part.name] = piece if len(part.shape) == 1 else piece.as_strided(part.shape, part.strides)

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Flat:
        """Copies of tensors of one type on one device; channels stay last where they are.

        Raises:
            ValueError: they are of several types.
        """
        parts, end, values = [], 0, list(tensors.values())
        for name, tensor in tensors.items():
            if tensor.dtype != values[0].dtype:
                raise ValueError("tensors of several types cannot lie in one buffer")
            parts.append(_Part(name, tensor.shape, _strides(tensor), end))
            end += tensor.numel()
        flat = cls(values[0].new_empty(end) if values else torch.empty(0), parts)
        if values:
            torch._foreach_copy_(list(flat.values()), values)
        return flat

    def to(self, device: torch.device | None, dtype: torch.dtype | None) -> Flat:
        """The same numbers in another type and elsewhere; None: those that they have."""
        buffer = self.buffer.to(device=device, dtype=dtype)
        return self if buffer is self.buffer else Flat(buffer, self._parts)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides without gaps: the tensor's own if it has none; as a convolution has them, or in order of the sides."""
    if tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def add_weighted(
    sums: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], weight: float
) -> Mapping[str, torch.Tensor]:
    """sums + weight * tensors in float64, in place where it can be.

    Args:
        sums: what this returned for the tensors before, of the same names; empty for the first.
    """
    if isinstance(tensors, Flat):
        values = tensors.buffer.double()
        if not sums:
            return Flat(values * weight, tensors._parts)
        if isinstance(sums, Flat) and sums._parts == tensors._parts:
            sums.buffer.add_(values, alpha=weight)
            return sums
    if not sums:
        return {name: value.double() * weight for name, value in tensors.items()}
    torch._foreach_add_(list(sums.values()), [tensors[name].double() for name in sums], alpha=weight)
    return sums


def average(sums: Mapping[str, torch.Tensor], total: float) -> dict[str, torch.Tensor]:
    """The weighted mean in float32 of a sum of models that was kept in float64."""
    return {name: (value / total).float() for name, value in sums.items()}


def with_prefix(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def pieces(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """What holds all numbers of these tensors, and nothing else, in as few tensors as they have."""
    return [tensors.buffer] if isinstance(tensors, Flat) else list(tensors.values())


def all_finite(*tensors: torch.Tensor) -> bool:
    """Whether all values of all these tensors are finite."""
    # A sum is infinite or NaN if one of its terms is, and takes a twentieth of the time of testing each term. A sum of
    # finite terms may overflow too, so each term is tested if the sum is not finite.
    if tensors and tensors[0].is_cuda and all(tensor.is_cuda and tensor.is_floating_point() for tensor in tensors):
        # On a GPU each kernel takes as long as a small tensor: the norms of all tensors are a few of them.
        together = torch.stack(torch._foreach_norm(list(tensors))).sum()
        return bool(torch.isfinite(together)) or all(bool(torch.isfinite(own).all()) for own in tensors)
    small: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        # Most tensors of a network are short vectors. A client may have made one or two of them on the CPU, and tensors
        # on two devices can't be concatenated, but their sums can be added.
        if tensor.numel() <= _SMALL and tensor.device == tensors[0].device:
            small.append(tensor.flatten())
        else:
            sums.append(tensor.sum())
    if small:
        sums.append((torch.cat(small) if len(small) > 1 else small[0]).sum())
    total = sum(sums[1:], start=sums[0]).item() if sums else 0
    return isfinite(total) or all(bool(torch.isfinite(own).all()) for own in tensors)


def rows_not_finite(matrix: torch.Tensor) -> torch.Tensor:
    """Indices (m,) int64, ascending, of the rows of `matrix` (n, d) in which a number is NaN or infinite.

    If there is none, the cost is that of reading the matrix once: the minimum and the maximum suffice, since both are
    NaN as soon as one number is. Testing each number took 12 times as long in float16.
    """
    if matrix.numel() == 0 or bool(torch.stack(torch.aminmax(matrix)).isfinite().all()):
        return torch.empty(0, dtype=torch.int64)
    pieces = matrix.split(_ROWS)
    return torch.cat([~piece.isfinite().all(dim=1) for piece in pieces]).nonzero().flatten()
