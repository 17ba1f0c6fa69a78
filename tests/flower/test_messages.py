"""Every message of every method is the same after it has travelled as bytes: values, types and layouts.

Methods that train take minutes: pytest -m slow tests/flower/test_messages.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fcl_bench.engine.blob import packed, unpacked
from fcl_bench.engine.node import Node
from fcl_bench.engine.remote.replies import deserialise, deserialise_reply, serialise, serialise_reply
from fcl_bench.protocol.message import Message
from tests.small_methods import NAMES, short_run, trains_by_gradient
from tests.small_runs import run_in

SAID = [field.name for field in dataclasses.fields(Message) if field.name not in ("tensors", "sums_of", "moments_of")]
QUICK = [name for name in NAMES if not trains_by_gradient(name)]
LONG = [pytest.param(name, marks=pytest.mark.slow) for name in NAMES if trains_by_gradient(name)]


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


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_every_message_comes_back(name, wire, tmp_path, monkeypatch):
    kinds, turn = set(), Node.turn

    def over_the_wire(self, client, broadcast):
        came = deserialise(serialise("turn", broadcast, run={})).message
        require_same(came, broadcast)
        require_same(unpacked(packed(broadcast))[0], broadcast)
        reply = turn(self, client, came)
        kinds.update(tensor.dtype for tensor in reply.upload.values())
        back = deserialise_reply(deserialise(serialise_reply(reply)))
        require_same(back.upload, reply.upload)
        for field in ("client", "seconds", "stored", "samples_kept", "accepted", "right"):
            assert getattr(back, field) == getattr(reply, field)
        return dataclasses.replace(back, guesses=reply.guesses)

    given = ("data=digits", "clients=2", "tasks=2", "beta=1", f"method={name}", *short_run(name), f"wire.dtype={wire}")
    plain = run_in(tmp_path / "plain", *given)
    monkeypatch.setattr(Node, "turn", over_the_wire)
    carried = run_in(tmp_path / "carried", *given)
    assert kinds
    files = [(outcome.folder / "model.safetensors").read_bytes() for outcome in (plain, carried)]
    assert files[0] == files[1]
