"""Messages as bytes: a JSON header and the tensors' own bytes. Nothing is pickled.

A tensor comes back with its dtype and its memory layout, since the rounding of a product may depend on the layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch

from fcl_bench.errors import UserError, first_line
from fcl_bench.protocol.message import Message

#: The attributes of a message, and what JSON holds of them.
_ABOUT = {"stage": str, "samples": int | None, "clients": int, "task": int, "round": int, "cached": list[str]}
_HEADER_LENGTH = 8
#: No message has a longer header: it takes twenty times as much memory as JSON.
LONGEST_HEADER = 2**24
_MOST_SIDES, _LONGEST_SIDE = 16, 2**40
_KINDS = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_DTYPES: dict[str, torch.dtype] = {kind: getattr(torch, kind) for kind in _KINDS}


def packed(message: Message, **beside: Any) -> bytes:
    """The message as bytes."""
    tensors, bodies = [], []
    for name, tensor in message.items():
        order = _order(tensor)
        rows = tensor.detach().permute(order).cpu().contiguous()
        tensors.append([name, str(tensor.dtype).removeprefix("torch."), list(rows.shape), order])
        bodies.append(rows.flatten().view(torch.uint8).numpy().data)
    about = {name: getattr(message, name) for name in _ABOUT} | {"cached": sorted(message.cached)}
    header = json.dumps({"tensors": tensors, "message": about, "beside": beside}).encode()
    return b"".join([len(header).to_bytes(_HEADER_LENGTH, "little"), header, *bodies])


def _order(tensor: torch.Tensor) -> list[int]:
    """The order of dimensions in which a tensor lies row by row; not ascending in Fortran order or channels last."""
    sides = list(range(tensor.ndim))
    if tensor.is_contiguous():
        return sides
    strides = tensor.stride()
    order = sorted(sides, key=lambda side: -strides[side])
    return order if tensor.permute(order).is_contiguous() else sides


class BadMessage(UserError, ValueError):
    """Bytes that another process sent are not what they should be."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "the same version of fcl-bench at both ends")


def unpacked(blob: bytes | memoryview) -> tuple[Message, dict[str, Any]]:
    """The message, and the further entries of its header. It takes no more memory than some times the blob's.

    Raises:
        BadMessage: the blob does not have the form that `packed` returns.
    """
    start = _HEADER_LENGTH + int.from_bytes(blob[:_HEADER_LENGTH], "little")
    if len(blob) < start or start > LONGEST_HEADER:
        raise BadMessage(f"a message of {len(blob)} bytes has a header of {start - _HEADER_LENGTH}")
    try:
        header = json.loads(bytes(blob[_HEADER_LENGTH:start]))
        found = {}
        for name, kind, shape, order in header["tensors"]:
            dtype = _DTYPES[kind]
            if type(name) is not str or name in found:
                raise ValueError("a tensor has no name of its own")
            if len(shape) > _MOST_SIDES or not fits(shape, list[int]) or max(shape, default=0) >= _LONGEST_SIDE:
                raise ValueError(f"{name} has a side that is no length, or too many")
            size = math.prod(shape) * dtype.itemsize
            if len(blob) < start + size:
                raise ValueError(f"they end within {name}")
            content = bytearray(blob[start : start + size])
            if dtype == torch.bool and content.strip(b"\0\1"):
                raise ValueError(f"{name} holds neither true nor false")
            body = torch.frombuffer(content, dtype=dtype) if size else torch.empty(0, dtype=dtype)
            found[name] = body.reshape(shape).permute([order.index(side) for side in range(len(shape))])
            start += size
        if not fits(header["message"], _ABOUT) or not isinstance(header["beside"], dict):
            raise ValueError("they say what no message says of itself")
        if start != len(blob):
            raise ValueError(f"{len(blob) - start} more follow")
        return Message(found, **header["message"]), header["beside"]
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, IndexError, OverflowError) as error:
        raise BadMessage(f"the bytes are no message: {first_line(error)}") from error


def together(messages: Mapping[int, Message]) -> Message:
    """The messages to several clients as one."""
    blobs = {str(client): bytearray(packed(own)) for client, own in messages.items()}
    return Message({client: torch.frombuffer(blob, dtype=torch.uint8) for client, blob in blobs.items()})


def fits(value: Any, form: Any) -> bool:
    """Whether what JSON held is of a type: numbers are 0 or more, whole ones below 2^53. A dataclass, or a mapping of
    names to types, stands for a mapping with just these names."""
    kind, parts = get_origin(form), get_args(form)
    if kind is UnionType:
        return any(fits(value, one) for one in parts)
    if kind is list:
        return isinstance(value, list) and all(fits(entry, parts[0]) for entry in value)
    if kind is dict:
        return isinstance(value, dict) and all(fits(entry, parts[1]) for entry in value.values())
    if is_dataclass(form):
        form = get_type_hints(form)
    if isinstance(form, dict):
        named = isinstance(value, dict) and value.keys() == form.keys()
        return named and all(fits(value[name], own) for name, own in form.items())
    if form in (int, float):
        return type(value) in (int, form) and 0 <= value < (2**53 if form is int else math.inf)
    return isinstance(value, form) and (form is not str or value.isprintable())
