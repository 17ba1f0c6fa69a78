"""Replies that wait for their turn: how many may, and that a waiting one is not a view of what comes after it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fcl_bench.engine.exchange import Reply
from fcl_bench.engine.remote import ranks
from fcl_bench.engine.remote.ranks import Rank
from fcl_bench.engine.remote.replies import serialise_reply
from fcl_bench.engine.remote.waiting import MOST, MOST_IN_ALL, OwnTurns, Room, share_of
from fcl_bench.protocol.message import Message


def taking(room: Room, size: int) -> threading.Thread:
    thread = threading.Thread(target=room.take, args=(size,), daemon=True)
    thread.start()
    return thread


def test_who_brings_more_than_there_is_room_for_waits_until_it_is_taken_away():
    room = Room(10)
    room.take(4)
    room.take(6)
    waiting = taking(room, 1)
    waiting.join(0.1)
    assert waiting.is_alive()
    room.give_back(4)
    waiting.join(10)
    assert not waiting.is_alive()


@pytest.mark.parametrize(("processes", "mebibytes"), [(1, 128), (2, 128), (8, 128), (9, 113), (64, 16), (1000, 1)])
def test_all_processes_together_have_a_bounded_room(processes, mebibytes):
    share = share_of(processes)
    assert share * processes <= MOST_IN_ALL == 2**30
    assert share <= MOST
    assert share // 2**20 == mebibytes


def test_the_ranks_have_these_shares(monkeypatch):
    """Of the peers of rank 0, and of its own turns."""
    given = []
    monkeypatch.setattr(ranks, "RankPeer", lambda rank, name, most: given.append(most))
    link = ranks.ServerRank(Rank(0, 64, 0, "here", 1))
    assert given == [16 * 2**20] * 63
    monkeypatch.setattr(ranks, "assign", lambda *_: [0])
    monkeypatch.setattr(ranks, "clients_in", lambda *_: [0])
    monkeypatch.setattr(ranks, "Host", lambda *_: None)
    monkeypatch.setattr(ranks, "ClientStore", lambda *_: None)
    link._peers.clear()
    clients = SimpleNamespace(count=1, tasks=1, run="", rows=lambda _: np.zeros(1, dtype=int), samples=lambda _: None)
    assert link.federate(clients, torch.zeros(1, 2, dtype=torch.uint8), Path())._most == 16 * 2**20


def test_what_is_larger_than_the_room_has_room_alone():
    room = Room(10)
    room.take(100)
    waiting = taking(room, 100)
    waiting.join(0.1)
    assert waiting.is_alive()
    room.give_back(100)
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_room_that_is_left_has_no_bound():
    room = Room(10)
    room.take(10)
    waiting = taking(room, 10)
    room.unbind()
    waiting.join(10)
    assert not waiting.is_alive()


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
    size = len(serialise_reply(next(replies(torch.zeros(3), 1))))
    for most, ahead in ((0, 1), (size, 1), (2 * size, 2), (3 * size - 1, 2)):
        own = OwnTurns(replies(torch.zeros(3), 5), most)
        assert [own.work_ahead() for _ in range(3)].count(True) == ahead
        assert own.next().client == 0
        assert own.work_ahead()
