"""Every message of every method is the same after it has travelled as bytes: values, types and layouts.

Methods that train take minutes: pytest -m slow tests/flower/test_messages.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fcl_bench.engine import exchange
from fcl_bench.engine.blob import packed, unpacked
from fcl_bench.engine.exchange import largest_reply
from fcl_bench.engine.node import Node
from fcl_bench.engine.remote.replies import deserialise, deserialise_reply, serialise, serialise_reply
from fcl_bench.protocol.context import WIRE_DTYPES, WireFormat
from fcl_bench.protocol.message import Message
from tests.conformance.cases import EVERY, federation_for, method_of
from tests.methods.glfc_harness import quickly, short_descent  # noqa: F401  # a fixture
from tests.methods.whole_runs import same

SAID = [field.name for field in dataclasses.fields(Message) if field.name not in ("tensors", "sums_of", "moments_of")]


def require_same(came: Message, sent: Message) -> None:
    assert list(came) == list(sent)
    for name in SAID:
        assert getattr(came, name) == getattr(sent, name), name
    for name, tensor in sent.items():
        other = came[name]
        assert other.dtype == tensor.dtype
        assert other.shape == tensor.shape
        assert torch.equal(*(part.contiguous().flatten().view(torch.uint8) for part in (other, tensor))), name
        if tensor.ndim == 2 and min(tensor.shape) > 1:
            columns = [part.T.is_contiguous() and not part.is_contiguous() for part in (other, tensor)]
            assert columns[0] == columns[1], name


@pytest.mark.slow_cases("lorm-float32")
@pytest.mark.parametrize(
    ("name", "wire"),
    [*((name, "float32") for name in EVERY), *((name, "bfloat16") for name in ("stsa", "fedran", "fedavg", "fedcbc"))],
)
@quickly
def test_every_message_comes_back(name, wire, monkeypatch):
    kinds, turn, bounds = set(), Node.turn, []
    monkeypatch.setattr(exchange, "largest_reply", lambda round_: bounds.append(largest_reply(round_)) or bounds[-1])

    def over_the_wire(self, client, broadcast):
        came = deserialise(serialise("turn", broadcast, run={})).message
        require_same(came, broadcast)
        require_same(unpacked(packed(broadcast))[0], broadcast)
        reply = turn(self, client, came)
        kinds.update(tensor.dtype for tensor in reply.upload.values())
        assert reply.upload.nbytes <= bounds[-1] - 2**20, "no honest reply is refused for its length"
        back = deserialise_reply(deserialise(serialise_reply(reply)))
        require_same(back.upload, reply.upload)
        for field in ("client", "seconds", "stored", "samples_kept", "accepted", "right", "counts"):
            assert getattr(back, field) == getattr(reply, field)
        return dataclasses.replace(back, guesses=reply.guesses)

    method, format_ = method_of(name), WireFormat(WIRE_DTYPES[wire])
    plain, carried = (federation_for(method, format_) for _ in range(2))
    if wire == "bfloat16":  # messages that are the same make the same model
        plain.run(lambda _: None)
    monkeypatch.setattr(Node, "turn", over_the_wire)
    carried.run(lambda _: None)
    assert kinds
    if wire == "bfloat16":
        assert same(carried.server.model(), plain.server.model())
