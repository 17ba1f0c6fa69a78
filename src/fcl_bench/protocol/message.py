"""What crosses the wire between a client and the server, and its size in bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from fcl_bench import config
from fcl_bench.errors import UserError

#: `wire.dtype`: the types in which uploads may travel.
WIRE_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in config.WIRE_DTYPES}
_HALF = (torch.float16, torch.bfloat16)
#: Suffixes under which parts of an encoded tensor travel; no other name may end so.
_SCALE, _PACKED, _HELD = "::scale", "::packed", "::held"


@dataclass(frozen=True)
class WireFormat:
    """`wire`: how messages travel. All but `dtype` is free of loss in float64 and float32.

    Attributes:
        dtype: of uploaded floating-point tensors.
        gram: "full" sends symmetric matrices whole; "packed" their upper triangle, about half the bytes.
        columns: "task" sends per-class matrices with a column for every class of the task; "held" only the columns
            that are not zero (those of the classes that the client holds), and their numbers, 4 bytes each.
        projection: "seed" broadcasts the random projection as 8 bytes; "matrix" as d x M numbers in float64.
    """

    dtype: torch.dtype
    gram: str = "full"
    columns: str = "task"
    projection: str = "seed"

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def column_bytes(rows: int | None, dtype: torch.dtype) -> int:
    """Bytes on the wire of one column of a matrix with `rows` rows, or (None) of one entry of a vector.

    See `Message.to_wire`: in a 16-bit type a column brings its float32 scale and a vector stays in float32.
    """
    half = dtype in _HALF
    if rows is None:
        return 4 if half else dtype.itemsize
    return rows * dtype.itemsize + (4 if half else 0)


class Message(Mapping[str, torch.Tensor]):
    """A flat mapping of names to tensors: all that a client and the server ever exchange.

    Args:
        tensors: what is sent.
        symmetric: names of the matrices that are symmetric and positive semidefinite.
        per_class: names of the matrices that have a column per class.
        kept: names of the tensors of a broadcast that never change again: a client that has had one keeps it, and it
            is sent, and counted, only once.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        symmetric: Iterable[str] = (),
        per_class: Iterable[str] = (),
        kept: Iterable[str] = (),
    ) -> None:
        self._tensors = dict(tensors)
        self._symmetric = frozenset(symmetric)
        self._per_class = frozenset(per_class)
        self.kept = frozenset(kept)
        self._sent: dict[frozenset[str], tuple[int, frozenset[str]]] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        """The payload in bytes: the tensors' values, no names or framing."""
        return self.nbytes_without(())

    def nbytes_without(self, there: Collection[str]) -> int:
        """The payload in bytes for a receiver that keeps the tensors named in `there`."""
        return sum(tensor.numel() * tensor.element_size() for name, tensor in self.items() if name not in there)

    def sent_to(self, there: frozenset[str]) -> tuple[int, frozenset[str]]:
        """Bytes for a receiver that keeps the tensors named in `there`, and what it keeps from then on.

        The answer is remembered: most of many receivers have the same, and then share one set, too.
        """
        if there not in self._sent:
            self._sent[there] = self.nbytes_without(there), there | self.kept
        return self._sent[there]

    def to_wire(self, wire: WireFormat) -> Message:
        """The message as it travels: floating-point tensors in `wire.dtype`, integers as they are.

        In a 16-bit type a matrix travels with one float32 scale per column, so that sums over many samples do not
        overflow, and a vector stays in float32. A packed matrix has one scale per row and column, the square root of
        its diagonal: the entries are then correlations.

        Raises:
            UserError: a finite value exceeds the range of `wire.dtype`.
            FloatingPointError: a value is not finite before it is sent.
        """
        encoded: dict[str, torch.Tensor] = {}
        for name, tensor in self._tensors.items():
            if not tensor.is_floating_point():
                encoded[name] = tensor
                continue
            if name in self._symmetric and wire.gram == "packed":
                parts = _packed(name, tensor, wire.dtype)
            elif name in self._per_class and wire.columns == "held":
                held = torch.nonzero((tensor != 0).any(dim=0)).squeeze(1)
                width = torch.tensor([tensor.shape[1]])
                numbers = torch.cat([width.to(held), held]).to(torch.int32)
                parts = {name + _HELD: numbers, **_scaled(name, tensor[:, held], wire.dtype)}
            else:
                parts = _scaled(name, tensor, wire.dtype)
            if not all(map(all_finite, parts.values())):
                self._refuse(name, wire)
            encoded.update(parts)
        return Message(encoded)

    def _refuse(self, name: str, wire: WireFormat) -> None:
        """A value left the range of the wire's type, or was no number to begin with."""
        if not bool(torch.isfinite(self._tensors[name]).all()):
            raise FloatingPointError(f"the upload's {name} is not finite")
        raise UserError(
            f"wire.dtype={wire} can't hold the upload's {name}: out of the type's range",
            "wire.dtype=float64, or features of a smaller scale",
        )

    def from_wire(self, dtype: torch.dtype, device: torch.device) -> Message:
        """What the receiver computes with: floating-point tensors in `dtype` on `device`, whole and unscaled."""
        decoded: dict[str, torch.Tensor] = {}
        for name, sent in self._tensors.items():
            if name.endswith((_SCALE, _HELD)):
                continue
            tensor = sent.to(device, dtype) if sent.is_floating_point() else sent.to(device)
            name = name.removesuffix(_PACKED)
            scale = self._tensors.get(name + _SCALE)
            if name + _PACKED in self._tensors:
                tensor = _unpacked(tensor, None if scale is None else scale.to(device, dtype))
            elif scale is not None:
                tensor = tensor * scale.to(device, dtype)
            if name + _HELD in self._tensors:
                numbers = self._tensors[name + _HELD].to(device).long()
                whole = tensor.new_zeros(tensor.shape[0], int(numbers[0]))
                whole[:, numbers[1:]] = tensor
                tensor = whole
            decoded[name] = tensor
        return Message(decoded)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether every value is."""
    # A sum has whatever infinity or NaN its terms have, and takes a twentieth of the time of a look at each of them. A
    # sum of finite terms may overflow all the same, so that only then each is looked at.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _scaled(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """`tensor` in `dtype`; a matrix in a 16-bit type with a float32 scale per column, a vector then in float32."""
    if dtype not in _HALF:
        return {name: tensor.to(dtype)}
    if tensor.ndim < 2:
        return {name: tensor.to(torch.float32)}
    scale = (tensor.abs().amax(dim=0, keepdim=True) if tensor.numel() else tensor[:1]).to(torch.float32)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return {name: (tensor / scale).to(dtype), name + _SCALE: scale}


def _packed(name: str, matrix: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The upper triangle of a symmetric `matrix`, by rows; in a 16-bit type of its correlations, with their scales."""
    upper = _upper(len(matrix), matrix.device)
    if dtype not in _HALF:
        return {name + _PACKED: matrix[upper].to(dtype)}
    scale = matrix.diagonal().sqrt().to(torch.float32)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    correlations = matrix / scale / scale.unsqueeze(1)
    return {name + _PACKED: correlations[upper].to(dtype), name + _SCALE: scale}


def _unpacked(triangle: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    size = math.isqrt(2 * len(triangle))
    matrix = triangle.new_zeros(size, size)
    matrix[_upper(size, triangle.device)] = triangle
    matrix += matrix.triu(1).T
    return matrix if scale is None else matrix * scale * scale.unsqueeze(1)


def _upper(size: int, device: torch.device) -> torch.Tensor:
    """Which entries of a matrix are on or above the diagonal."""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu()
