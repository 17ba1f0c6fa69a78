"""The wire codec: converts a message to the types and forms in which it travels, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from fcl_bench.engine.middleware import Middleware
from fcl_bench.errors import UserError
from fcl_bench.linalg.tensors import Flat, all_finite, pieces
from fcl_bench.linalg.triangle import packed, symmetric
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.fields import CLASSES
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.uploads import Uploads
from fcl_bench.protocol.wire import HALF, WireFormat

#: Suffixes under which parts of an encoded tensor travel; no other name may end with them.
SCALE, PACKED, HELD = "::scale", "::packed", "::held"


class Codec(Middleware):
    """Encodes what one side sends, and decodes what it receives. It is the last step before the wire.

    Both directions use one form. With `wire` None, tensors are sent as they are.

    Args:
        uploads: what is declared of uploads.
        wire: the form of sent messages.
        dtype, device: those of received floating-point tensors; None: as they come.
        as_sent: leave whole tensors that came in a narrower type in that type; `validate_upload` widens them after it
            has looked at them, which takes half the time.
    """

    def __init__(
        self,
        uploads: Uploads,
        wire: WireFormat | None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        as_sent: bool = False,
    ) -> None:
        self._uploads = uploads
        self._wire, self._dtype, self._device, self._as_sent = wire, dtype, device, as_sent

    @classmethod
    def of_clients(cls, uploads: Uploads, context: Context) -> Codec:
        """Uploads travel in the form `wire`; broadcasts are used in the types in which they came."""
        return cls(uploads, context.wire)

    @classmethod
    def of_server(cls, uploads: Uploads, context: Context, as_sent: bool = False) -> Codec:
        """Broadcasts travel in the types they have; uploads are absorbed in the statistics' type on the device."""
        return cls(uploads, None, context.dtype, context.device, as_sent)

    def send(self, message: Message, client: int | None) -> Message:
        return message if self._wire is None else encoded(message, self._wire, self._uploads)

    def receive(self, message: Message, client: int) -> Message:
        # One buffer changes its type in one operation, before anyone looks at it.
        if self._as_sent and travels_whole(message) and not isinstance(message.tensors, Flat):
            moved = {name: _moved(sent, self._unless_narrower(sent), self._device) for name, sent in message.items()}
            return message.with_tensors(moved)
        return decoded(message, self._dtype, self._device)

    def _unless_narrower(self, sent: torch.Tensor) -> torch.dtype | None:
        return sent.dtype if narrower(sent, self._dtype) else self._dtype


def encoded(message: Message, wire: WireFormat, uploads: Uploads) -> Message:
    """The message as it travels: floating-point tensors in `wire.dtype`, integers as they are.

    Matrices of unit columns travel as int8 with `wire.factors` "int8": the receiver makes their length 1 again, so no
    scale is sent. In a 16-bit type any other matrix travels with one float32 scale per column, so that sums over many
    samples do not overflow, and a vector stays in float32. A packed matrix has one scale per row and column, the square
    root of its diagonal: the entries are then correlations.

    Raises:
        UserError: a finite value exceeds the range of `wire.dtype`.
        FloatingPointError: a value is not finite before it is sent.
    """
    if wire.dtype not in HALF and not uploads.has_forms(message.stage):
        return _plain(message, wire)
    sent: dict[str, torch.Tensor] = {}
    for name, tensor in message.items():
        if not tensor.is_floating_point():
            sent[name] = tensor
            continue
        declared = uploads.field(message.stage, name)
        if declared is None:
            parts = _scaled(name, tensor, wire.dtype)
        elif declared.unit and wire.factors == "int8":
            parts = {name: _quantised(name, tensor)}
        elif declared.form == "gram" and wire.gram == "packed":
            parts = _packed(name, tensor, wire.dtype)
        elif declared.columns == CLASSES and wire.columns == "held":
            held = torch.nonzero((tensor != 0).any(dim=0)).squeeze(1)
            width = torch.tensor([tensor.shape[1]])
            numbers = torch.cat([width.to(held), held]).to(torch.int32)
            parts = {name + HELD: numbers, **_scaled(name, tensor[:, held], wire.dtype)}
        else:
            parts = _scaled(name, tensor, wire.dtype)
        sent.update(parts)
    # All tensors are checked at once, since one check per tensor would cost more than the checking itself.
    if not all_finite(*(part for part in sent.values() if part.is_floating_point())):
        raise _not_finite(message, sent, wire)
    return message.with_tensors(sent)


def _plain(message: Message, wire: WireFormat) -> Message:
    """What `encoded` returns where no tensor has a form of its own: it travels as it is, in `wire.dtype`."""
    sent = _converted(message.tensors, wire.dtype, None)
    if not all_finite(*(part for part in pieces(sent) if part.is_floating_point())):
        raise _not_finite(message, sent, wire)
    return message if sent is message.tensors else message.with_tensors(sent)


def _converted(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, device: torch.device | None
) -> Mapping[str, torch.Tensor]:
    """Floating-point tensors in a type, all of them on a device; None: those of each tensor."""
    if isinstance(tensors, Flat) and tensors.buffer.is_floating_point():
        return tensors.to(device, dtype)
    return {name: _moved(tensor, dtype, device) for name, tensor in tensors.items()}


def _not_finite(message: Message, sent: Mapping[str, torch.Tensor], wire: WireFormat) -> Exception:
    """The error to raise for the first tensor that has a part in `sent` that is not finite."""
    for name, tensor in message.items():
        if not all_finite(tensor):
            return FloatingPointError(f"the upload's {name} is not finite")
        if not all_finite(*(sent[name + part] for part in ("", SCALE, PACKED) if name + part in sent)):
            break
    return UserError(
        f"wire.dtype={wire} can't hold the upload's {name}: out of the type's range",
        "wire.dtype=float64, or features of a smaller scale",
    )


def decoded(message: Message, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Message:
    """The message that the receiver computes with: floating-point tensors in `dtype` on `device`, whole and unscaled.

    Args:
        message: what `encoded` returned.
        dtype, device: None: those of each tensor.
    """
    if travels_whole(message):
        if dtype is None and device is None:
            return message
        return message.with_tensors(_converted(message.tensors, dtype, device))
    received: dict[str, torch.Tensor] = {}
    for name, sent in message.items():
        if name.endswith((SCALE, HELD)):
            continue
        tensor = _moved(sent, dtype, device)
        if sent.dtype == torch.int8:
            received[name] = _unit_columns(tensor.to(dtype or torch.float32))
            continue
        name = name.removesuffix(PACKED)
        scale = message.get(name + SCALE)
        if name + PACKED in message:
            tensor = _unpacked(tensor, None if scale is None else _moved(scale, dtype, device))
        elif scale is not None:
            tensor = tensor * _moved(scale, dtype, device)
        if name + HELD in message:
            numbers = message[name + HELD].to(tensor.device).long()
            whole = tensor.new_zeros(tensor.shape[0], int(numbers[0]))
            whole[:, numbers[1:]] = tensor
            tensor = whole
        received[name] = tensor
    return dataclasses.replace(message, tensors=received)


def travels_whole(message: Message) -> bool:
    """Whether each tensor of an encoded message is a whole tensor of the message itself, in no special form."""
    return not any(sent.dtype is torch.int8 or name.endswith((SCALE, PACKED, HELD)) for name, sent in message.items())


def narrower(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether the tensor is of a floating-point type all of whose numbers `dtype` has too."""
    return tensor.dtype == torch.float32 and dtype == torch.float64


def _moved(tensor: torch.Tensor, dtype: torch.dtype | None, device: torch.device | None) -> torch.Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)


def _scaled(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """`tensor` in `dtype`. In a 16-bit type a matrix has a float32 scale per column, and a vector stays in float32."""
    if dtype not in HALF:
        return {name: tensor.to(dtype)}
    if tensor.ndim < 2:
        return {name: tensor.to(torch.float32)}
    scale = (tensor.abs().amax(dim=0, keepdim=True) if tensor.numel() else tensor[:1]).to(torch.float32)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return {name: (tensor / scale).to(dtype), name + SCALE: scale}


def _quantised(name: str, factor: torch.Tensor) -> torch.Tensor:
    """Unit columns (M, r) as integers from -127 to 127: each column in units of its largest entry / 127."""
    if not all_finite(factor):
        raise FloatingPointError(f"the upload's {name} is not finite")
    largest = factor.abs().amax(dim=0, keepdim=True) if factor.numel() else factor[:1]
    return (factor * (127 / torch.where(largest > 0, largest, torch.ones_like(largest)))).round().to(torch.int8)


def _unit_columns(factor: torch.Tensor) -> torch.Tensor:
    """`factor` (M, r) with columns scaled to length 1; a column of zeros stays as it is."""
    lengths = torch.linalg.vector_norm(factor, dim=0)
    return factor / torch.where(lengths > 0, lengths, torch.ones_like(lengths))


def _packed(name: str, matrix: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The upper triangle of a symmetric `matrix`, by rows; in a 16-bit type that of its correlations, with scales."""
    if dtype not in HALF:
        return {name + PACKED: packed(matrix).to(dtype)}
    scale = matrix.diagonal().sqrt().to(torch.float32)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    correlations = (matrix / scale).div_(scale.unsqueeze(1))
    return {name + PACKED: packed(correlations).to(dtype), name + SCALE: scale}


def _unpacked(triangle: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    matrix = symmetric(triangle)
    return matrix if scale is None else (matrix * scale).mul_(scale.unsqueeze(1))
