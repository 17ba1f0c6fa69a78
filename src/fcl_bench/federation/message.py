"""What crosses the wire between a client and the server, and its size in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

#: `wire.dtype`: the types in which uploads may travel.
WIRE_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_HALF = (torch.float16, torch.bfloat16)
_SCALE = ".scale"


def column_bytes(rows: int | None, dtype: torch.dtype) -> int:
    """Bytes on the wire of one column of a matrix with `rows` rows, or (None) of one entry of a vector.

    See `Message.to_wire`: in a 16-bit type a column brings its float32 scale and a vector stays in float32.
    """
    half = dtype in _HALF
    if rows is None:
        return 4 if half else dtype.itemsize
    return rows * dtype.itemsize + (4 if half else 0)


class Message(Mapping[str, torch.Tensor]):
    """A flat mapping of names to tensors: all that a client and the server ever exchange."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        """The payload in bytes: the tensors' values, no names or framing."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    def to_wire(self, dtype: torch.dtype) -> Message:
        """The message as it travels: floating-point tensors in `dtype`, integers as they are.

        In a 16-bit type a matrix travels with one float32 scale per column, so that sums over many samples do not
        overflow, and a vector stays in float32.
        """
        encoded: dict[str, torch.Tensor] = {}
        half = dtype in _HALF
        for name, tensor in self._tensors.items():
            if not tensor.is_floating_point():
                encoded[name] = tensor
            elif half and tensor.ndim < 2:
                encoded[name] = tensor.to(torch.float32)
            elif half:
                scale = tensor.abs().amax(dim=0, keepdim=True) if tensor.numel() else tensor[:1]
                scale = torch.where(scale > 0, scale, torch.ones_like(scale)).to(torch.float32)
                encoded[name] = (tensor / scale).to(dtype)
                encoded[name + _SCALE] = scale
            else:
                encoded[name] = tensor.to(dtype)
        return Message(encoded)

    def from_wire(self, dtype: torch.dtype, device: torch.device) -> Message:
        """What the receiver computes with: floating-point tensors in `dtype` on `device`, scales applied."""
        decoded: dict[str, torch.Tensor] = {}
        for name, tensor in self._tensors.items():
            if name.endswith(_SCALE):
                continue
            decoded[name] = tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
            if name + _SCALE in self._tensors:
                decoded[name] = decoded[name] * self._tensors[name + _SCALE].to(device, dtype)
        return Message(decoded)
