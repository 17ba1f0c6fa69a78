"""Nothing is absorbed but what the server expects."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fcl_bench.engine.middleware import Middleware
from fcl_bench.errors import UserError
from fcl_bench.linalg.finite import all_finite
from fcl_bench.protocol.expected import Expectation, Expected
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Server


class BadUpload(UserError):
    """An upload that is not what the server expects: which client, task, round and field, and what was expected."""

    def __init__(self, client: int, message: Message, what: str, expected: str) -> None:
        where = f"task {message.task}, round {message.round} ({message.stage})"
        super().__init__(f"client {client}'s upload in {where}: {what}", f"expected: {expected}")


def admitted(client: int, upload: Message, middleware: Middleware, server: Server, expected: Expectation) -> Message:
    """The upload as the server absorbs it.

    Args:
        client: who sent it.
        upload: as it came from the wire.
        middleware: of the server's side.
        server: whom to ask for objections.
        expected: the fields of an upload of this round.

    Raises:
        BadUpload: it can't be decoded, a field is missing, unknown, of another shape or type, not finite or out of its
            range, or the fields contradict each other.
    """
    try:
        message = middleware.receive(upload, client)
    except (RuntimeError, IndexError, ValueError) as error:
        raise BadUpload(client, upload, f"it cannot be decoded ({error})", ", ".join(expected)) from error
    if found := first_objection(message, expected):
        field, what, wanted = found
        raise BadUpload(client, upload, f"{field} {what}", wanted)
    if upload.samples is not None and upload.samples < 1:
        raise BadUpload(client, upload, f"samples={upload.samples}", "at least 1")
    if said := server.objection(message):
        raise BadUpload(client, upload, said, "fields that agree with each other")
    return message


def first_objection(tensors: Mapping[str, torch.Tensor], expected: Expectation) -> tuple[str, str, str] | None:
    """What is wrong with an upload: the field, what it is, and what was expected. None where nothing is.

    Args:
        tensors: the decoded upload.
        expected: of each field.
    """
    for name, wanted in expected.items():
        if name not in tensors and not wanted.optional:
            return name, "is missing", f"the fields {', '.join(expected)}"
    sides: dict[str, int] = {}
    for name, tensor in tensors.items():
        if name not in expected:
            return name, "is no field of this upload", f"the fields {', '.join(expected)}"
        wanted = expected[name]
        fits = len(wanted.shape) == tensor.ndim and all(
            length == (sides.setdefault(side, length) if isinstance(side, str) else side)
            for side, length in zip(wanted.shape, tensor.shape, strict=True)
        )
        if not fits:
            shape = ", ".join(f"{side}={sides[side]}" if side in sides else str(side) for side in wanted.shape)
            return name, f"has the shape {tuple(tensor.shape)}", f"({shape})"
        if problem := _values(tensor, wanted):
            return name, *problem
    return None


def _values(tensor: torch.Tensor, wanted: Expected) -> tuple[str, str] | None:
    right_kind = {
        "real": tensor.is_floating_point(),
        "whole": not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool,
        "bytes": tensor.dtype == torch.uint8,
    }[wanted.kind]
    if not right_kind:
        kinds = {"real": "a floating-point type", "whole": "an integer type", "bytes": "uint8"}
        return f"has the type {str(tensor.dtype).removeprefix('torch.')}", kinds[wanted.kind]
    if wanted.kind == "real" and not all_finite(tensor):
        return "is not finite", "finite numbers"
    if tensor.numel() and wanted.least is not None and (least := tensor.min().item()) < wanted.least:
        return f"holds {least:g}", f"no value below {wanted.least}"
    if tensor.numel() and wanted.below is not None and (most := tensor.max().item()) >= wanted.below:
        return f"holds {most:g}", f"values below {wanted.below}"
    return None
