"""What counts against a round's deadline. The line to the SuperLink is a stand-in, so that no Flower is needed."""

from __future__ import annotations

import pytest
import torch

from fcl_bench.engine.exchange import Reply
from fcl_bench.engine.remote.replies import serialise_reply
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
