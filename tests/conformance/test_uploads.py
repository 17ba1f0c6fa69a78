"""What clients send: the bytes are those of the declared fields, and every bad version is refused in one line.

Both are asked of the same run, since a run of a method that trains takes a quarter of a second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import pytest
import torch

from fcl_bench.engine.codec import HELD, PACKED, SCALE, decoded
from fcl_bench.engine.exchange import Reply
from fcl_bench.engine.loop import Federation
from fcl_bench.protocol.context import WireFormat
from fcl_bench.protocol.fields import CLASSES, Field, Schema, declared_field
from fcl_bench.protocol.message import Message
from tests.conformance.cases import (
    COMPACT,
    EVERY,
    FLOAT32,
    MAY_BE_LEFT_OUT,
    MORE,
    federation_for,
    method_of,
    same_once_decoded,
)
from tests.engine.hostile import CLIENT, TASK, tried, variants
from tests.methods.glfc_harness import quickly, short_descent  # noqa: F401  # a fixture

#: Whose fields have forms of their own on a compact wire; those of the other methods are only shorter.
FORMS = [
    *("afcl", "afl", "air", "centred_sketch", "ds_al", "fedklda", "fedlda", "fedncm", "fedran", "lga", "lorm"),
    *("gaussian_sketch", "pilora", "ranpac", "regmean", "stsa", "stsa_e", "from outside"),
]


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


def watched_uploads(federation: Federation) -> list[tuple[Reply, Mapping[str, Field]]]:
    """Grows in the coming run by every upload as it travels, and what was declared of it."""
    exchange, seen = federation.transport.exchange, []

    def watched(present, broadcast):
        for reply in exchange(present, broadcast):
            task = federation.stream.tasks[broadcast.task]
            seen.append((reply, federation.server.schema(task, broadcast.stage)))
            yield reply

    federation.transport.exchange = watched  # type: ignore[method-assign]
    return seen


def assert_bytes(federation: Federation, seen: list[tuple[Reply, Mapping[str, Field]]], wire: WireFormat) -> None:
    """Of each upload of a run that is over those of its fields' formulas, and they are counted in the ledger."""
    formulas = []
    for reply, declared in seen:
        whole = decoded(reply.upload)
        sides = lengths(whole, declared)
        total = 0 if whole.samples is None else 8
        for key, tensor in whole.items():
            own = declared_field(declared, key)
            shape = tuple(sides[side] if isinstance(side, str) else side for side in own.shape)
            total += bytes_of(own, shape, tensor, wire)
        formulas.append(total)
    assert [reply.upload.nbytes for reply, _ in seen] == formulas
    counted = [row.up_bytes for row in federation.state.ledger.uploads if row.up_bytes]
    assert counted == [total for total in formulas if total]


#: Full columns of 32 bits, of a method whose fields have forms of their own.
HALF_COMPACT = WireFormat(torch.float32, gram="packed", columns="held", factors="int8")


@pytest.mark.slow_cases("lorm 0.5", "lorm compact")
@pytest.mark.parametrize(
    ("name", "knobs", "wire"),
    [
        *(pytest.param(name, {}, FLOAT32, id=name) for name in EVERY),
        *(pytest.param(name, {}, COMPACT, id=f"{name} compact") for name in FORMS),
        *(pytest.param(name, own, COMPACT, id=" ".join(map(str, [name, *own.values()]))) for name, own in MORE),
    ],
)
@quickly
def test_each_has_the_bytes_of_its_fields_and_is_refused_in_one_line_if_it_is_bad(name, knobs, wire):
    method, honest = method_of(name, **knobs), {}

    def noted(upload: Message, declared: Schema):
        honest[upload.stage] = upload
        return variants(upload, declared)

    federation = federation_for(method, wire)
    seen = watched_uploads(federation)
    told = tried(federation, noted)
    assert_bytes(federation, seen, wire)
    assert len(told) > 8
    for case in told:
        field, upload = case.hostile.field, honest[case.stage]
        if case.refusal is None:
            left_out = (name, field) in MAY_BE_LEFT_OUT and case.hostile.kind == "missing"
            same = case.hostile.upload.samples == upload.samples and same_once_decoded(case.hostile.upload, upload)
            assert left_out or same, (case.stage, field, case.hostile.kind)
            continue
        where = f"client {CLIENT}'s upload in task {TASK}, round {case.round} ({case.stage}): "
        assert case.refusal.startswith(where)
        assert "\n" not in case.refusal
        assert " (expected: " in case.refusal
        # The field itself, or one that it no longer agrees with.
        bare = {re.sub(f"({SCALE}|{PACKED}|{HELD})$", "", key) for key in [*upload, "extra", "samples"]}
        named = any(key in case.refusal.removeprefix(where) for key in bare)
        assert named or case.refusal.removeprefix(where).startswith("it "), case.refusal


@pytest.mark.slow_cases("lorm", "pilora")
@pytest.mark.parametrize("name", FORMS)
@quickly
def test_forms_of_32_bits_have_their_bytes(name):
    federation = federation_for(method_of(name), HALF_COMPACT)
    seen = watched_uploads(federation)
    federation.run(lambda _: None)
    assert_bytes(federation, seen, HALF_COMPACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EVERY if name not in FORMS])
@quickly
def test_uploads_without_a_form_of_their_own_have_their_bytes_on_a_compact_wire(name):
    for wire in (COMPACT, HALF_COMPACT):
        federation = federation_for(method_of(name), wire)
        seen = watched_uploads(federation)
        federation.run(lambda _: None)
        assert_bytes(federation, seen, wire)
