"""Messages as bytes: a JSON header and the tensors' own bytes. Nothing is pickled.

A tensor comes back with its dtype and its memory layout, since the rounding of a product may depend on the layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from fcl_bench.protocol.message import Message

#: The attributes of a message that are sets of names, and those that are plain.
_SETS = ("cached",)
_PLAIN = ("stage", "samples", "clients", "task", "round")
_HEADER_LENGTH = 8


def packed(message: Message, **beside: Any) -> bytes:
    """The message as bytes."""
    tensors, bodies = [], []
    for name, tensor in message.items():
        order = _order(tensor)
        rows = tensor.detach().permute(order).cpu().contiguous()
        tensors.append([name, str(tensor.dtype).removeprefix("torch."), list(rows.shape), order])
        bodies.append(rows.flatten().view(torch.uint8).numpy().data)
    about = {name: getattr(message, name) for name in _PLAIN} | {name: sorted(getattr(message, name)) for name in _SETS}
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


def unpacked(blob: bytes | memoryview) -> tuple[Message, dict[str, Any]]:
    """The message, and the further entries of its header.

    Raises:
        ValueError: the blob does not have the form that `packed` returns.
    """
    start = _HEADER_LENGTH + int.from_bytes(blob[:_HEADER_LENGTH], "little")
    if len(blob) < start:
        raise ValueError(f"a message of {len(blob)} bytes ends within its header")
    try:
        header = json.loads(bytes(blob[_HEADER_LENGTH:start]))
        tensors, about, beside = header["tensors"], header["message"], header["beside"]
        found = {}
        for name, kind, shape, order in tensors:
            dtype = getattr(torch, kind)
            size = torch.Size(shape).numel() * dtype.itemsize
            if len(blob) < start + size:
                raise ValueError(f"the message ends within {name}")
            body = (
                torch.frombuffer(bytearray(blob[start : start + size]), dtype=dtype)
                if size
                else torch.empty(0, dtype=dtype)
            )
            found[name] = body.reshape(shape).permute([order.index(side) for side in range(len(shape))])
            start += size
        message = Message(found, **_known(about))
    except (TypeError, KeyError, AttributeError, RuntimeError, IndexError) as error:
        raise ValueError(f"the bytes are no message: {error}") from error
    if start != len(blob):
        raise ValueError(f"{len(blob) - start} bytes follow the message")
    return message, beside


def _known(about: Mapping[str, Any]) -> dict[str, Any]:
    return {name: about[name] for name in (*_PLAIN, *_SETS)}
