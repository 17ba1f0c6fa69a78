"""What messages pass through: the order of a chain, and what a step on either side changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fcl_bench.engine.codec import Chain, Codec, Middleware, chained, decoded, encoded
from fcl_bench.engine.in_process import InProcess
from fcl_bench.methods.closed_form.stsa import STSA, STSAServer
from fcl_bench.protocol.context import WireFormat
from fcl_bench.protocol.fields import CLASSES, Uploads, counts, gram_matrix, real
from fcl_bench.protocol.message import Message
from tests.engine.counting import CONTEXT, federation
from tests.methods.harness import context_of
from tests.methods.training_harness import feature_tasks, federation_of

DECLARED = Uploads({"stage": {"G": gram_matrix("M"), "B": real("M", "c", columns=CLASSES), "n": counts("c")}})


class Writing(Middleware):
    """Appends its name to the stage of what passes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def send(self, message, client):
        return dataclasses.replace(message, stage=f"{message.stage}>{self.name}")

    def receive(self, message, client):
        return dataclasses.replace(message, stage=f"{message.stage}<{self.name}")


def test_what_is_sent_passes_the_steps_in_order_and_what_is_received_in_reverse():
    chain = Chain([Writing("a"), Writing("b"), Writing("c")])
    assert chain.send(Message({}, "s"), 0).stage == "s>a>b>c"
    assert chain.receive(Message({}, "s"), 0).stage == "s<c<b<a"
    # A chain is a step, too.
    nested = Chain([Writing("x"), chain])
    assert nested.receive(nested.send(Message({}, "s"), 0), 0).stage == "s>x>a>b>c<c<b<a<x"


def test_a_single_step_is_no_chain():
    alone, other = Writing("a"), Writing("b")
    assert chained([alone]) is alone
    assert chained([alone, other]).send(Message({}, "s"), 0).stage == "s>a>b"


def test_no_step_changes_nothing():
    message = Message({"a": torch.zeros(2)})
    for step in (Chain([]), Middleware(), Chain([Middleware()])):
        assert step.send(message, None) is message
        assert step.receive(message, 3) is message


class Noting(Middleware):
    """Keeps what passes, with its client."""

    def __init__(self) -> None:
        self.sent: list[tuple[int | None, Message]] = []
        self.received: list[tuple[int, Message]] = []

    def send(self, message, client):
        self.sent.append((client, message))
        return message

    def receive(self, message, client):
        self.received.append((client, message))
        return message


class Clipping(Middleware):
    """Uploads have at most this norm."""

    def __init__(self, most: float) -> None:
        self._most = most

    def send(self, message, client):
        if client is None:
            return message
        norm = torch.stack([value.norm() for value in message.values()]).norm()
        factor = min(1.0, self._most / float(norm))
        return message.with_tensors({name: value * factor for name, value in message.items()})


def with_middleware(*steps: Middleware):
    return lambda *parts: InProcess.of(*parts, middleware=steps)


def test_a_clipping_step_of_the_clients_changes_what_is_absorbed():
    """Two rounds of each task."""
    plain, _ = federation()
    plain.run(lambda _: None)
    assert plain.server.total.tolist() == [4.0, 4.0, 2.0]
    clipped, _ = federation(transport=with_middleware(Clipping(0.5)))
    clipped.run(lambda _: None)
    # Task 0: 4 uploads of (1, 0, 0), half of each. Task 1: client 0's is (0, 2, 0), client 2's (0, 0, 1).
    torch.testing.assert_close(clipped.server.total, torch.tensor([2, 1, 1], dtype=torch.float64))
    unbound, _ = federation(transport=with_middleware(Clipping(100.0)))
    unbound.run(lambda _: None)
    assert torch.equal(unbound.server.total, plain.server.total)


def test_steps_of_the_clients_are_before_the_codec():
    """They see what the method made, in its own type; what they make is what travels, and is counted."""
    step = Noting()
    made, _ = federation(transport=with_middleware(step))
    state = made.run(lambda _: None)
    assert [client for client, _ in step.sent] == [0, 1, 0, 1, 0, 2, 0, 2]
    assert {message["sum"].dtype for _, message in step.sent} == {torch.float64}
    assert [client for client, _ in step.received] == [client for client, _ in step.sent]
    assert all("round" in message for _, message in step.received)
    assert {row.up_bytes for row in state.ledger.uploads} == {0, 12}


def test_a_step_of_the_server_sees_every_upload_as_it_was_sent_and_every_broadcast_once():
    clients, server = Noting(), Noting()
    made, _ = federation(transport=with_middleware(clients), middleware=[server])
    made.run(lambda _: None)
    assert [client for client, _ in server.received] == [client for client, _ in clients.sent]
    for (_, arrived), (_, sent) in zip(server.received, clients.sent, strict=True):
        assert (arrived.stage, arrived.task, arrived.round) == (sent.stage, sent.task, sent.round)
        assert arrived["sum"].dtype == torch.float64
        assert torch.equal(arrived["sum"], sent["sum"].float().double())
    # Two tasks, two rounds, each with its numbers; to all at once.
    assert [(client, message.task, message.round) for client, message in server.sent] == [
        (None, task, round_) for task in (0, 1) for round_ in (0, 1)
    ]
    assert all((message.task, message.round) == (0, 0) for _, message in clients.received[:2])
    assert all((message.task, message.round) == (1, 1) for _, message in clients.received[-2:])


@pytest.mark.parametrize("wire", [{"wire": "float16"}, {"wire": "float32", "gram": "packed", "columns": "held"}])
def test_a_step_of_the_server_sees_whole_tensors_whatever_the_wire(wire):
    tasks, step = feature_tasks(0, [2, 2], [[9, 4], [5, 8]]), Noting()
    made = federation_of(STSA(M=7), context_of(6, **wire), tasks, middleware=[step])
    made.run(lambda _: None)
    assert len(step.received) == 4
    for _, upload in step.received:
        assert {name: tuple(value.shape) for name, value in upload.items()} == {"G": (7, 7), "C": (7, 2)}
        assert {value.dtype for value in upload.values()} == {torch.float64}
    total = sum(upload["G"] for _, upload in step.received)
    assert torch.equal(made.server.estimate.matrix, total)


def test_the_codec_of_each_side_is_the_other_ones_inverse():
    context = dataclasses.replace(CONTEXT, wire=WireFormat(torch.float32, gram="packed", columns="held"))
    clients, server = Codec(DECLARED, context.wire), Codec(DECLARED, None, context.dtype, context.device)
    A = torch.randn(4, 4).double()
    upload = Message({"G": A @ A.T, "B": A[:, :2]}, "stage", 7, task=2, round=3)
    sent = clients.send(upload, 0)
    assert torch.equal(sent["G::packed"], encoded(upload, context.wire, DECLARED)["G::packed"])
    arrived = server.receive(sent, 0)
    assert (arrived.stage, arrived.samples, arrived.task, arrived.round) == ("stage", 7, 2, 3)
    assert {value.dtype for value in arrived.values()} == {torch.float64}
    assert torch.equal(arrived["B"], decoded(sent, torch.float64)["B"])
    broadcast = Message({"W": torch.zeros(2, dtype=torch.float16)}, cached=["W"])
    assert server.send(broadcast, None) is broadcast
    received = clients.receive(broadcast, 1)
    assert received["W"].dtype == torch.float16
    assert received.cached == {"W"}


def test_a_codec_may_leave_whole_tensors_as_they_were_sent():
    A = torch.randn(4, 4)
    upload = Message({"G": A @ A.T, "n": torch.arange(3)}, "stage")
    as_sent = Codec(DECLARED, None, CONTEXT.dtype, CONTEXT.device, as_sent=True)
    assert {name: value.dtype for name, value in as_sent.receive(upload, 0).items()} == {
        "G": torch.float32,
        "n": torch.int64,
    }
    packed = encoded(upload, WireFormat(torch.float32, gram="packed"), DECLARED)
    assert as_sent.receive(packed, 0)["G"].dtype == torch.float64
    narrow = dataclasses.replace(CONTEXT, dtype=torch.float32)
    assert (
        Codec(DECLARED, None, narrow.dtype, narrow.device, as_sent=True)
        .receive(upload.with_tensors({"G": A.double()}), 0)["G"]
        .dtype
        == A.dtype
    )


def test_a_server_absorbs_float32_only_where_it_adds_up(monkeypatch):
    """In place of the copy in float64: the same sum to the last bit; everything else comes in float64."""
    types, absorb = [], STSAServer.absorb

    def noted(server, client, upload):
        types.append({name: value.dtype for name, value in upload.items()})
        absorb(server, client, upload)

    monkeypatch.setattr(STSAServer, "absorb", noted)
    tasks = feature_tasks(0, [2, 2], [[12, 9], [10, 11]])
    made = [
        federation_of(STSA(M=7), context_of(6, wire="float32"), tasks, middleware=steps)
        for steps in ([], [Middleware()])
    ]
    for one in made:
        one.run(lambda _: None)
    first, second = (one.server for one in made)
    assert types == [{"G": torch.float32, "C": torch.float64}] * 4 + [{"G": torch.float64, "C": torch.float64}] * 4
    assert torch.equal(first.estimate.matrix, second.estimate.matrix)
    assert torch.equal(first.W, second.W)
