"""What crosses the wire between a client and the server, and its size in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from fcl_bench.errors import UserError

#: `wire.dtype`: the types in which uploads may travel.
WIRE_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_HALF = (torch.float16, torch.bfloat16)
#: Suffix of the names under which scales travel; no other name may end so.
_SCALE = "::scale"


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

        Raises:
            UserError: a finite value exceeds the range of `dtype`.
            FloatingPointError: a value is not finite before it is sent.
        """
        encoded: dict[str, torch.Tensor] = {}
        half = dtype in _HALF
        for name, tensor in self._tensors.items():
            if not tensor.is_floating_point():
                encoded[name] = tensor
            elif half and tensor.ndim < 2:
                encoded[name] = tensor.to(torch.float32)
            elif half:
                scale = (tensor.abs().amax(dim=0, keepdim=True) if tensor.numel() else tensor[:1]).to(torch.float32)
                scale = torch.where(scale > 0, scale, torch.ones_like(scale))
                encoded[name] = (tensor / scale).to(dtype)
                encoded[name + _SCALE] = scale
            else:
                encoded[name] = tensor.to(dtype)
        for name, tensor in encoded.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                self._refuse(name.removesuffix(_SCALE), dtype)
        return Message(encoded)

    def _refuse(self, name: str, dtype: torch.dtype) -> None:
        """A value left the range of the wire's type, or was no number to begin with."""
        if not bool(torch.isfinite(self._tensors[name]).all()):
            raise FloatingPointError(f"the upload's {name} is not finite")
        raise UserError(
            f"wire.dtype={str(dtype).removeprefix('torch.')} can't hold the upload's {name}: out of the type's range",
            "wire.dtype=float64, or features of a smaller scale",
        )

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
