"""The check of messages before they are decoded, so that a sender cannot choose how much memory decoding takes."""

from __future__ import annotations

import torch

from fcl_bench.engine.codec import HELD, PACKED, SCALE, travels_whole
from fcl_bench.protocol.fields import Field, Schema
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.wire import HALF, WireFormat


def form_objection(upload: Message, expected: Schema, wire: WireFormat | None) -> tuple[str, str, str] | None:
    """What is wrong with the form of an upload: the field, what it is, and what was expected. None if nothing is wrong.

    Args:
        upload: as it travelled.
        expected: the expectation of each decoded field.
        wire: the form that it has to travel in; None: any.
    """
    suffixes = (PACKED, SCALE, HELD)
    whole_only = travels_whole(upload)
    if whole_only and (wire is None or (wire.dtype not in HALF and _all_of(upload, wire.dtype))):
        return None
    for name, wanted in expected.items():
        packed, scale, held = (None if whole_only else upload.get(name + suffix) for suffix in suffixes)
        whole = upload.get(name) if packed is None else packed
        if whole is None:
            continue
        found = wanted.kind == "real" and _type_objection(name, whole, upload, wire, wanted.unit)
        found = found or _scale_objection(whole, scale, packed is not None)
        if not found and scale is None and wire is not None and wire.dtype in HALF and whole.dtype in HALF:
            found = "comes without its scales", "one for each column"
        if found or (held is not None and (found := _held_objection(whole, held, wanted))):
            return name, *found
    return None


def _all_of(upload: Message, dtype: torch.dtype) -> bool:
    """Whether all tensors are of this type."""
    return all(tensor.dtype is dtype for tensor in upload.tensors.values())


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
    name: str, sent: torch.Tensor, upload: Message, wire: WireFormat | None, unit: bool
) -> tuple[str, str] | None:
    if wire is None or (sent.dtype == torch.int8 and unit and wire.factors == "int8"):
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
