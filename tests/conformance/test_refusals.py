"""Every bad version of an honest upload is refused in one line, in every stage; the honest ones are absorbed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fcl_bench.engine.codec import HELD, PACKED, SCALE, decoded
from fcl_bench.protocol.fields import Schema
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.wire import WireFormat
from tests.conformance.cases import EVERY, FLOAT32, federation_for, method_of
from tests.engine.hostile import CLIENT, TASK, tried, variants
from tests.methods.glfc_harness import quickly, short_descent  # noqa: F401  # a fixture

COMPACT = WireFormat(torch.float16, gram="packed", columns="held", factors="int8")
#: Whose fields have forms of their own on a compact wire; those of the other methods are only shorter.
FORMS = [
    *("afcl", "afl", "air", "centred_sketch", "ds_al", "fedklda", "fedlda", "fedncm", "fedran", "lga", "lorm"),
    *("pilora", "ranpac", "regmean", "stsa", "stsa_e", "from outside"),
]
#: Knobs with which a method sends something else.
MORE: list[tuple[str, dict[str, Any]]] = [
    ("afl", {"M": 8}),
    ("air", {"correction": "logits"}),
    ("centred_sketch", {"rank": 2, "remainder": "gaussian", "input_rank": 2, "input_remainder": "diagonal"}),
    ("fedfecam", {"covariance": "shared"}),
    ("fedklda", {"ensemble": 2}),
    ("fedlda", {"centre": "all_tasks"}),
    ("ranpac", {"ridge": "folds", "folds": 2}),
    ("fedicarl", {"classify": "nme", "memory": 6}),
    ("fedprotip", {"columns": 8, "sketch": 40}),
    ("fedavg", {"ccvr": "gaussian"}),
    ("fot", {"columns": 8, "share_of": "inputs"}),
    ("lorm", {"alpha": 0.5}),
    ("regmean", {"damping": 0.0}),
]
#: Fields that an honest client may leave out: gradients come with a signal only.
MAY_BE_LEFT_OUT = {("glfc", "gradients"), ("lga", "gradients")}


def same_once_decoded(a: Message, b: Message) -> bool:
    one, other = (decoded(message, torch.float64) for message in (a, b))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


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
