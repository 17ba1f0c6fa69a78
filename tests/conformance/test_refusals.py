"""Every bad version of an honest upload is refused in one line, in every stage; the honest ones are absorbed."""

from __future__ import annotations

import re

import pytest

from fcl_bench.engine.codec import HELD, PACKED, SCALE
from fcl_bench.protocol.fields import Schema
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
    *("pilora", "ranpac", "regmean", "stsa", "stsa_e", "from outside"),
]


@pytest.mark.parametrize(
    ("name", "knobs", "wire"),
    [
        *(pytest.param(name, {}, FLOAT32, id=name) for name in EVERY),
        *(pytest.param(name, {}, COMPACT, id=f"{name} compact") for name in FORMS),
        *(pytest.param(name, own, COMPACT, id=" ".join(map(str, [name, *own.values()]))) for name, own in MORE),
    ],
)
@quickly
def test_each_is_refused_in_one_line_or_is_what_an_honest_client_sends(name, knobs, wire):
    method, honest = method_of(name, **knobs), {}

    def noted(upload: Message, declared: Schema):
        honest[upload.stage] = upload
        return variants(upload, declared)

    told = tried(federation_for(method, wire), noted)
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
