"""The bytes of an upload are those of its declared fields: their shapes, and the wire's form of each."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch

from fcl_bench.engine.codec import decoded
from fcl_bench.engine.exchange import Reply
from fcl_bench.engine.loop import Federation
from fcl_bench.protocol.context import WireFormat
from fcl_bench.protocol.fields import CLASSES, Field, Schema, declared_field
from fcl_bench.protocol.message import Message
from tests.conformance.cases import EVERY, federation_for, method_of
from tests.methods.glfc_harness import quickly, short_descent  # noqa: F401  # a fixture

WIRES = {
    "float32": WireFormat(torch.float32),
    "float32 compact": WireFormat(torch.float32, gram="packed", columns="held", factors="int8"),
    "float16 compact": WireFormat(torch.float16, gram="packed", columns="held", factors="int8"),
}


def lengths(upload: Message, declared: Schema) -> dict[str, int]:
    """The lengths that the sender chose, by the names of the sides."""
    found: dict[str, int] = {}
    for name, tensor in upload.items():
        own = declared_field(declared, name)
        assert own is not None, name
        assert len(own.shape) == tensor.ndim, name
        for side, length in zip(own.shape, tensor.shape, strict=True):
            if isinstance(side, str):
                assert found.setdefault(side, length) == length, f"{name}: {side}"
            else:
                assert side == length, name
    return found


def bytes_of(own: Field, shape: tuple[int, ...], whole: torch.Tensor, wire: WireFormat) -> int:
    """The formula for a field whose sides have these lengths; `whole` is only looked at for columns of zeros."""
    half = wire.dtype == torch.float16
    size, scale = (2, 4) if half else (4, 0)
    numbers = math.prod(shape)
    if own.kind == "bytes":
        return numbers
    if own.kind == "whole":
        return numbers * whole.element_size()
    if own.unit and wire.factors == "int8":
        return numbers
    if own.form == "gram" and wire.gram == "packed":
        return size * shape[0] * (shape[0] + 1) // 2 + scale * shape[0]
    if len(shape) < 2:
        return 4 * numbers
    if own.columns == CLASSES and wire.columns == "held":
        held = int((whole != 0).any(dim=0).sum())
        return size * shape[0] * held + scale * held + 4 * (1 + held)
    return size * numbers + scale * math.prod(shape[1:])


def uploads_of(federation: Federation) -> list[tuple[Reply, Mapping[str, Field]]]:
    """Every upload of a run as it travelled, and what was declared of it."""
    exchange, seen = federation.transport.exchange, []

    def watched(present, broadcast):
        for reply in exchange(present, broadcast):
            task = federation.stream.tasks[broadcast.task]
            seen.append((reply, federation.server.schema(task, broadcast.stage)))
            yield reply

    federation.transport.exchange = watched  # type: ignore[method-assign]
    federation.run(lambda _: None)
    return seen


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", EVERY)
@quickly
def test_uploads_have_the_bytes_of_their_fields(name, wire):
    federation = federation_for(method_of(name), WIRES[wire])
    seen = uploads_of(federation)
    formulas = []
    for reply, declared in seen:
        whole = decoded(reply.upload)
        sides = lengths(whole, declared)
        total = 0 if whole.samples is None else 8
        for key, tensor in whole.items():
            own = declared_field(declared, key)
            shape = tuple(sides[side] if isinstance(side, str) else side for side in own.shape)
            total += bytes_of(own, shape, tensor, WIRES[wire])
        formulas.append(total)
    assert [reply.upload.nbytes for reply, _ in seen] == formulas
    counted = [row.up_bytes for row in federation.state.ledger.uploads if row.up_bytes]
    assert counted == [total for total in formulas if total]
