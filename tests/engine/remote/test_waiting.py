"""Replies that wait for their turn: how many may, and that a waiting one is not a view of what comes after it."""

from __future__ import annotations

import torch

from fcl_bench.engine.exchange import Reply
from fcl_bench.engine.remote.transport import AHEAD, OwnTurns
from fcl_bench.protocol.message import Message


def replies(upload: torch.Tensor, count: int):
    """Replies whose uploads all lie in the same memory."""
    for client in range(count):
        yield Reply(client, Message({"x": upload.fill_(client)}), 0.5, None, {"model": 4}, 0)


def test_a_reply_that_waits_keeps_its_numbers():
    own = OwnTurns(replies(torch.zeros(3), 3))
    assert own.work_ahead()
    assert own.work_ahead()
    found = [own.next() for _ in range(3)]
    assert [reply.client for reply in found] == [0, 1, 2]
    assert [reply.upload["x"].tolist() for reply in found] == [[0] * 3, [1] * 3, [2] * 3]
    assert (found[0].seconds, found[0].stored) == (0.5, {"model": 4})
    assert not own.work_ahead()


def test_turns_are_done_ahead_as_long_as_their_replies_have_room():
    own = OwnTurns(replies(torch.zeros(3), AHEAD + 2))
    assert [own.work_ahead() for _ in range(AHEAD + 1)] == [True] * AHEAD + [False]
    assert own.next().client == 0
    assert own.work_ahead()
