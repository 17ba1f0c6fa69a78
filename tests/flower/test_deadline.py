"""What counts against a round's deadline. The line to the SuperLink is a stand-in, so that no Flower is needed."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import fcl_bench
from fcl_bench.engine.codec import RawSamples
from fcl_bench.engine.exchange import Reply
from fcl_bench.engine.remote.replies import serialise, serialise_reply
from fcl_bench.flower import transport
from fcl_bench.flower.node_registry import NodeInfo, NodeRegistry
from fcl_bench.flower.relay import Answer
from fcl_bench.flower.transport import FlowerTransport
from fcl_bench.protocol.message import Message


class Clock:
    """Seconds that pass where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class StandIn:
    """A line to nodes with one client each, whose answers take so many seconds."""

    def __init__(self, clock: Clock, seconds: dict[str, float]) -> None:
        self._clock, self._seconds, self._due = clock, seconds, {}

    def nodes(self) -> list[str]:
        return list(self._seconds)

    def push(self, node: str, seconds: float, request: bytes) -> str:
        reply = Reply(int(node), Message({"x": torch.ones(1)}, task=0, round=0), 0.0, None, {}, 0)
        self._due[node] = (self._clock.now + self._seconds[node], serialise_reply(reply))
        return node

    def pull(self, messages):
        for name in messages:
            if self._due[name][0] <= self._clock.now:
                yield Answer(name, [self._due[name][1]])


@pytest.mark.parametrize(
    ("takes", "absorbing", "came"),
    [
        (0.5, 2.5, ["Reply", "Reply"]),  # it was there before the deadline
        (1.5, 1.0, ["Reply", "Reply"]),
        (2.05, 0.0, ["Reply", "Reply"]),  # between two looks
        (9.0, 2.5, ["Reply", "Lost"]),
    ],
)
def test_what_the_server_computes_does_not_count(monkeypatch, takes, absorbing, came):
    """A client that had answered in time was lost where the server took longer than the deadline over another's."""
    clock = Clock()
    monkeypatch.setattr(transport, "time", clock)
    seconds = {"0": 0.0, "1": takes}
    registry = NodeRegistry(2, 1, lambda clients: None)
    for node in seconds:
        info = NodeInfo(
            node, "run", "version", "torch", 1, None, "cpu", [int(node)], [[5]], [[5]], {}, "data", "place", {}
        )
        registry.register(node, info)
    flower = FlowerTransport(StandIn(clock, seconds), {"id": "x"}, registry, deadline=2.1)
    found = []
    for answer in flower.exchange([0, 1], Message({}, task=0, round=0)):
        found.append(type(answer).__name__)
        if answer.client == 0:
            clock.sleep(absorbing)
    assert found == came
    assert clock.now - 100.0 < absorbing + 2.5


def test_a_question_that_is_lost_is_asked_again_ever_later(monkeypatch):
    """What harms messages may harm the question who a node is, too; a node that works on a turn only answers late."""
    clock, pushed, lost = Clock(), [], 3
    monkeypatch.setattr(transport, "time", clock)
    raw = RawSamples("features", 8)
    info = NodeInfo(
        "0", "run", fcl_bench.__version__, "torch", 1, None, "cpu", [0], [[5]], [[5]], raw, "data", "place", {}
    )

    class Line(StandIn):
        def push(self, node, seconds, request):
            pushed.append(clock.now - 100.0)
            return str(len(pushed))

        def pull(self, messages):
            assert set(messages) == {str(number + 1) for number in range(len(pushed))}
            if len(pushed) > lost:
                yield Answer(str(len(pushed)), [serialise("info", **dataclasses.asdict(info))])

    flower = FlowerTransport(Line(clock, {"0": 0.0}), {"id": "x"}, NodeRegistry(1, 1, lambda info: None), 600)
    assert [found.clients for found in flower.open()] == [[0]]
    gaps = [later - before for before, later in itertools.pairwise(pushed)]
    assert [round(gap / transport._SLOW) for gap in gaps] == [1, 2, 4]
    assert not flower._requests
