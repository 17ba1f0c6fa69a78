"""What a transport is part of: a run's id only where rounds may be partial; and how extraction is shared out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from fcl_bench.engine.remote.ranks import shares
from fcl_bench.engine.remote.replies import deserialise, serialise
from fcl_bench.engine.transport import PartialRounds
from fcl_bench.errors import UserError
from fcl_bench.execution.serve import Site
from fcl_bench.typed import typed_instance
from tests.small_runs import settings_for


@dataclass
class Carried(PartialRounds):
    name: ClassVar[str] = "carried"

    def connect(self):
        raise AssertionError("nobody asks")


def test_a_transport_is_no_part_of_a_runs_id(tmp_path):
    one, ranks = (settings_for(tmp_path, f"transport={name}") for name in ("in_process", "ranks"))
    assert one.identity() == ranks.identity()
    assert "transport" not in one.identity()


def test_partial_rounds_are_when_they_are_set(tmp_path):
    settings = settings_for(tmp_path)
    alone = settings.identity()
    settings.transport = Carried()
    assert settings.identity() == alone
    settings.transport = Carried(minimum=0.8)
    assert settings.identity() == {**alone, "transport": {"minimum": 0.8, "deadline": None}}
    settings.transport = Carried(minimum=0.8, deadline=600.0)
    assert settings.identity()["transport"] == {"minimum": 0.8, "deadline": 600.0}
    # Whoever is late ends the run, which has no result then.
    settings.transport = Carried(deadline=600.0)
    assert settings.identity() == alone
    for knobs in ({"minimum": 1.2}, {"minimum": -0.1}, {"deadline": 0.0}):
        with pytest.raises(UserError, match=rf"^transport\.{next(iter(knobs))}="):
            typed_instance(Carried, knobs, "transport")


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize(("start", "end", "batch"), [(0, 100, 7), (14, 100, 7), (0, 56, 7), (0, 8, 1)])
def test_shares_of_an_extraction_are_whole_batches_and_all_of_them(processes, start, end, batch):
    found = shares(start, end, batch, processes)
    assert [sample for share in found for sample in share] == list(range(start, end))
    assert all((share.start - start) % batch == 0 for share in found)
    assert len(found) == processes
    assert max(map(len, found)) - min(map(len, found)) <= 2 * batch


def test_a_process_extracts_the_features_of_a_whole_pass(tmp_path):
    """Of digits with an untrained network, from the second batch on."""
    settings = settings_for(tmp_path, "method=afl", "backbone=tiny", "backbone.width=4", "profile=quick")
    site = Site(settings, "rank 1", lambda clients: range(1, clients.count, 2))
    plan = site.plan
    whole = torch.cat(list(plan.extractor.batches(plan.dealt.dataset.train)))
    batch = plan.extractor.batch
    [blob] = site.answers(deserialise(serialise("extract", side="train", start=batch, end=len(whole))))
    assert torch.equal(deserialise(blob).message["features"], whole[batch:])
    [blob] = site.answers(deserialise(serialise("extract", side="train", start=0, end=2 * batch)))
    assert torch.equal(deserialise(blob).message["features"], whole[: 2 * batch])
    with pytest.raises(ValueError, match="exchange before the clients are there"):
        list(site.answers(deserialise(serialise("exchange", clients=[]))))
