"""An upload that no ledger has is found among those that a server absorbed."""

from __future__ import annotations

import pytest
import torch

from fcl_bench.flower.transport import FlowerTransport
from tests.flower import recording
from tests.flower.fake_superlink import FakeSuperLink, reached
from tests.small_runs import run_in

GIVEN = ("data=digits", "clients=3", "tasks=2", "beta=1", "logger=none", "transport=flower", "method=afl")


@pytest.mark.slow
@pytest.mark.parametrize("harmed", [False, True])
def test_every_absorbed_upload_is_one_that_left(tmp_path, monkeypatch, harmed):
    saved, link, turns = tmp_path / "absorbed", FakeSuperLink(tmp_path / "nodes"), FlowerTransport._take_turns
    saved.mkdir()
    link.add_node(0)
    link.add_node(1, 2)

    def taken(self, answer, request, current):
        turns(self, answer, request, current)
        if harmed and 1 in current.replies and not current.replies[1].upload.task:
            tensor = current.replies[1].upload["C"]
            tensor.view(torch.uint8).flatten()[0] ^= 1

    monkeypatch.setattr(FlowerTransport, "_take_turns", taken)
    monkeypatch.setattr(FlowerTransport, "exchange", FlowerTransport.exchange)  # put back afterwards
    recording.record(saved)
    with reached(link, monkeypatch):
        run_in(tmp_path / "there", *GIVEN)
    assert [line["client"] for line in recording.absorbed(saved)] == [0, 1, 2] * 2
    strange = recording.never_sent(saved, (tmp_path / "nodes").rglob("ledger.jsonl"))
    assert [(line["client"], line["task"]) for line in strange] == ([(1, 0)] if harmed else [])
