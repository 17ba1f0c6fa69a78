"""What is announced is bounded by what is expected, before anything is allocated: ranks, nodes, the bound itself."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from fcl_bench.engine.blob import LONGEST_HEADER
from fcl_bench.engine.exchange import Held, Round, Stopwatch, largest_reply
from fcl_bench.engine.remote import peers
from fcl_bench.engine.remote.peers import RankPeer
from fcl_bench.engine.remote.transport import Gone
from fcl_bench.errors import UserError
from fcl_bench.protocol.context import Task
from fcl_bench.protocol.fields import counts, gram_matrix, orthonormal
from fcl_bench.protocol.message import Message
from tests.flower.fake_superlink import FakeSuperLink, reached
from tests.small_runs import run_in

SMALL = ("method=afl", "data=digits", "clients=3", "tasks=2", "logger=none", "transport=flower")


@pytest.mark.parametrize("announced", [2**62, -(2**62), LONGEST_HEADER + 1, 5000])
def test_a_rank_that_announces_more_than_is_expected_is_gone_before_anything_is_allocated(monkeypatch, announced):
    def receive(tensor: torch.Tensor, rank: int) -> None:
        assert tensor.dtype == torch.int64, "a body was allocated and read"
        tensor.fill_(announced)

    monkeypatch.setattr(peers.dist, "recv", receive)
    peer = RankPeer(1, "rank 1", 4096)
    with pytest.raises(Gone, match=f"announces {announced} bytes, where at most 4096 are expected"):
        peer.receive(5.0)
    with pytest.raises(UserError, match="rank 1 was lost: it announces"):
        peer.response("plan")


@pytest.mark.slow
def test_a_node_that_sends_too_much_ends_the_run_at_once(tmp_path, monkeypatch):
    """It is not asked again until the deadline, since its next answer would be no shorter."""
    link = FakeSuperLink(tmp_path / "nodes")
    link.add_node(0, 1)
    name = link.add_node(2)
    honest = link.workers[name].answer
    link.workers[name].answer = lambda request: [blob + bytes(2**26) * (b"reply" in blob) for blob in honest(request)]
    begin = time.monotonic()
    with reached(link, monkeypatch), pytest.raises(UserError, match=r"client 2 was lost .*not taken: .* bytes"):
        run_in(tmp_path, *SMALL, "transport.deadline=60")
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("said", [b"", b"no message", b"\xff" * 40])
def test_a_node_that_answers_anything_else_ends_the_run_in_one_line(tmp_path, monkeypatch, said):
    link = FakeSuperLink(tmp_path / "nodes")
    link.add_node(0, 1)
    name = link.add_node(2)
    honest = link.workers[name].answer
    link.workers[name].answer = lambda request: [said if b"reply" in blob else blob for blob in honest(request)]
    with (
        reached(link, monkeypatch),
        pytest.raises(UserError, match="the node of clients 2: .*(message of|no message)") as told,
    ):
        run_in(tmp_path, *SMALL, "transport.deadline=20")
    assert "\n" not in str(told.value)


def test_the_bound_has_room_for_whatever_honest_clients_may_send():
    schema = {"G": gram_matrix(200), "V": orthonormal(200, "r"), "n": counts("g")}
    held = Held(np.array([3, 5]), np.array([3, 5]), np.array([300, 500]))
    round_ = Round(Task(0, [0, 1], 2), 0, [0, 1], Message({}), schema, held, Stopwatch(torch.device("cpu")))
    largest = 8 * (200 * 200 + 200 * 500 + 500)
    assert largest < largest_reply(round_) < 3 * largest + 2**20
