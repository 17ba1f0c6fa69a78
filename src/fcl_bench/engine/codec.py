"""The wire: the steps that messages pass through between the two halves, and the codec, which is the last of them.

The codec converts a message to the types and forms in which it travels, and back. What arrives is checked for its form
before it is decoded, so that a sender cannot choose how much memory decoding takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import normalize

from fcl_bench.errors import UserError
from fcl_bench.linalg.tensors import Flat, all_finite, pieces
from fcl_bench.protocol.context import HALF, WireFormat, column_bytes
from fcl_bench.protocol.fields import CLASSES, UNDECLARED, Field, Schema, Uploads
from fcl_bench.protocol.message import Message

#: Suffixes under which parts of an encoded tensor travel; no other name may end with them.
SCALE, PACKED, HELD = "::scale", "::packed", "::held"
#: Of a label on the wire, an int32.
_LABEL = 4


class Middleware:
    """One step on one side, the clients' or the server's: the wire codec, and later clipping, noise, masks, faults.

    Both methods return the message unchanged unless a subclass says otherwise.
    """

    def send(self, message: Message, client: int | None) -> Message:
        """The message that goes on to the other side; `client` is its sender, None: it is a broadcast to all."""
        return message

    def receive(self, message: Message, client: int) -> Message:
        """The message that came from the other side; `client` is the one that sent it, or that receives it."""
        return message

    def answer(self, client: int, request: Message) -> Message | None:
        """What a client's side answers to a request of the server's middleware; None: it knows no such request."""
        return None


class Chain(Middleware):
    """Several steps as one: a message that is sent passes them in order, one that is received in reverse.

    Args:
        steps: from the method outwards; the wire codec comes last.
    """

    def __init__(self, steps: Sequence[Middleware]) -> None:
        self._steps = tuple(steps)

    def send(self, message: Message, client: int | None) -> Message:
        for step in self._steps:
            message = step.send(message, client)
        return message

    def receive(self, message: Message, client: int) -> Message:
        for step in reversed(self._steps):
            message = step.receive(message, client)
        return message

    def answer(self, client: int, request: Message) -> Message | None:
        answers = (step.answer(client, request) for step in self._steps)
        return next((answer for answer in answers if answer is not None), None)


def chained(steps: Sequence[Middleware]) -> Middleware:
    """Several steps as one; a single step is itself."""
    return steps[0] if len(steps) == 1 else Chain(steps)


class Codec(Middleware):
    """Encodes what one side sends, and decodes what it receives. It is the last step before the wire.

    Args:
        wire: the form of the clients' uploads; None: the server's side, whose broadcasts travel in the types they have.
        dtype, device: those of received floating-point tensors, which the server absorbs in the statistics' type on its
            device; None: as they come.
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

    def send(self, message: Message, client: int | None) -> Message:
        return message if self._wire is None else encoded(message, self._wire, self._uploads)

    def receive(self, message: Message, client: int) -> Message:
        # One buffer changes its type in one operation, before anyone looks at it.
        if self._as_sent and travels_whole(message) and not isinstance(message.tensors, Flat):
            types = {name: sent.dtype if narrower(sent, self._dtype) else self._dtype for name, sent in message.items()}
            return message.with_tensors({name: _moved(message[name], types[name], self._device) for name in types})
        return decoded(message, self._dtype, self._device)


def encoded(message: Message, wire: WireFormat, uploads: Uploads = UNDECLARED) -> Message:
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
        whole = _converted(message.tensors, wire.dtype, None)
        if not all_finite(*(part for part in pieces(whole) if part.is_floating_point())):
            raise _not_finite(message, whole, wire)
        return message if whole is message.tensors else message.with_tensors(whole)
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
    """The message that the receiver computes with: real tensors in `dtype` on `device` (None: as sent), unscaled."""
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
            received[name] = normalize(tensor.to(dtype or torch.float32), dim=0)
            continue
        name = name.removesuffix(PACKED)
        scale = message.get(name + SCALE)
        if name + PACKED in message:
            from fcl_bench.linalg.structure import symmetric  # a model has no such matrix

            tensor = symmetric(tensor)
            if scale is not None:
                scale = _moved(scale, dtype, device)
                tensor = (tensor * scale).mul_(scale.unsqueeze(1))
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
    return not any(
        sent.dtype is torch.int8 or name.endswith((SCALE, PACKED, HELD)) for name, sent in message.tensors.items()
    )


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


def _packed(name: str, matrix: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The upper triangle of a symmetric `matrix`, by rows; in a 16-bit type that of its correlations, with scales."""
    from fcl_bench.linalg.structure import packed  # a model has no such matrix

    if dtype not in HALF:
        return {name + PACKED: packed(matrix).to(dtype)}
    scale = matrix.diagonal().sqrt().to(torch.float32)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    correlations = (matrix / scale).div_(scale.unsqueeze(1))
    return {name + PACKED: packed(correlations).to(dtype), name + SCALE: scale}


def form_objection(upload: Message, expected: Schema, wire: WireFormat) -> tuple[str, str, str] | None:
    """What is wrong with an upload's form: the field, what it is, and what was expected. None if nothing is wrong."""
    suffixes = (PACKED, SCALE, HELD)
    whole_only = travels_whole(upload)
    types = {tensor.dtype for tensor in upload.tensors.values()}
    if whole_only and wire.dtype not in HALF and types <= {wire.dtype}:
        return None
    for name, wanted in expected.items():
        packed, scale, held = (None if whole_only else upload.get(name + suffix) for suffix in suffixes)
        whole = upload.get(name) if packed is None else packed
        if whole is None:
            continue
        found = wanted.kind == "real" and _type_objection(name, whole, upload, wire, wanted.unit)
        found = found or _scale_objection(whole, scale, packed is not None)
        if not found and scale is None and wire.dtype in HALF and whole.dtype in HALF:
            found = "comes without its scales", "one for each column"
        if found or (held is not None and (found := _held_objection(whole, held, wanted))):
            return name, *found
    return None


def rounding_of(upload: Message, name: str) -> float:
    """The relative error of a field's entries due to the type in which it travelled."""
    sent = upload.get(name + PACKED, upload.get(name))
    if sent is not None and sent.dtype == torch.int8 and sent.ndim == 2 and sent.numel():
        # For unit columns: half a step in each entry, divided by the length of the column.
        error = 0.5 * len(sent) ** 0.5 / max(float(torch.linalg.vector_norm(sent.double(), dim=0).min()), 1.0)
        return (2 * error + error**2) / 4
    if sent is None or not sent.is_floating_point():
        return torch.finfo(torch.float64).eps
    return torch.finfo(sent.dtype).eps


def _type_objection(
    name: str, sent: torch.Tensor, upload: Message, wire: WireFormat, unit: bool
) -> tuple[str, str] | None:
    if sent.dtype == torch.int8 and unit and wire.factors == "int8":
        return None
    if not sent.is_floating_point():
        return f"has the type {str(sent.dtype).removeprefix('torch.')}", "a floating-point type"
    # A vector on a 16-bit wire stays in float32; a packed field is a matrix.
    vector = sent.ndim < 2 and name + PACKED not in upload
    right = torch.float32 if vector and wire.dtype in HALF else wire.dtype
    if sent.dtype == right:
        return None
    return f"travels as {str(sent.dtype).removeprefix('torch.')}", str(right).removeprefix("torch.")


def _scale_objection(sent: torch.Tensor, scale: torch.Tensor | None, packed: bool) -> tuple[str, str] | None:
    if scale is None:
        return None
    # The columns of a tensor without rows have no scales.
    fits = scale.ndim == 1 if packed else sent.ndim > 1 and scale.shape == sent[:1].shape
    if packed and fits:
        fits = sent.ndim == 1 and len(scale) * (len(scale) + 1) // 2 == len(sent)
    if not fits:
        return f"has scales of the shape {tuple(scale.shape)}", "one for each column"
    if scale.dtype != torch.float32 or not bool((scale > 0).all() & scale.isfinite().all()):
        return "has a scale that is no positive number in float32", "positive finite numbers"
    # The scale is the largest entry of its column; in a packed matrix no correlation is above 1.
    largest, room = (float(sent.abs().max()) if sent.numel() else 0.0), 4 * torch.finfo(sent.dtype).eps
    if not largest <= 1 + room:
        return f"holds {largest:.4g} times its scale", "at most 1"
    return None


def _held_objection(sent: torch.Tensor, held: torch.Tensor, wanted: Field) -> tuple[str, str] | None:
    if held.ndim != 1 or not len(held) or held.is_floating_point() or held.is_complex() or sent.ndim != 2:
        return "comes with no numbers of its columns", "the width, and the number of each column"
    width, numbers = int(held[0]), held[1:]
    side = wanted.shape[-1] if wanted.shape else None
    most = side if isinstance(side, int) else wanted.widest
    if width != side if isinstance(side, int) else not 0 <= width <= (most if most is not None else sent.shape[1]):
        return f"is said to have {width} columns", str(side) if isinstance(side, int) else f"at most {most}"
    if len(numbers) != sent.shape[1]:
        return f"comes with {len(numbers)} numbers of its {sent.shape[1]} columns", "one for each column"
    if len(numbers) and (int(numbers.min()) < 0 or int(numbers.max()) >= width):
        return f"names columns {int(numbers.min())} to {int(numbers.max())}", f"0 to {width - 1}"
    if len(numbers.unique()) < len(numbers):
        return "names a column twice", "each column once"
    return None


@dataclass(frozen=True)
class RawSamples:
    """The cost of sending samples as they are, as `centralised_ridge` and `centralised` do.

    Attributes:
        kind: "features", or "images" for methods that train the network.
        upload_bytes: additional bytes of every upload: the scales of a 16-bit wire type.
    """

    kind: str
    sample_bytes: int
    upload_bytes: int = 0

    @classmethod
    def of(cls, inputs: torch.Tensor, wire: WireFormat) -> RawSamples:
        """The cost of samples like `inputs` (n, ...): images travel as bytes, features in the wire's type."""
        numbers = int(np.prod(inputs.shape[1:]))
        if inputs.dtype == torch.uint8:
            return cls("images", numbers + _LABEL)
        scales = numbers * column_bytes(0, wire.dtype)
        return cls("features", numbers * column_bytes(1, wire.dtype) - scales + _LABEL, scales)

    def cost(self, samples: np.ndarray) -> np.ndarray:
        """Bytes for these numbers of samples; 0 for no samples."""
        return samples * self.sample_bytes + np.where(samples > 0, self.upload_bytes, 0)
